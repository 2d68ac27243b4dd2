"""Changing the pace of a model: by a schedule, or by `paceline set pace=...`.

Start with switcher.py. choice.py decides which pace a model begins with, requests.py receives
changes while the job runs, handover.py moves the state from one pace to the next.
"""
