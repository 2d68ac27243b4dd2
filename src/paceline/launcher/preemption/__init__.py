"""Notices that a machine goes away: where they come from, and how they are read.

    notice.py    Notice: why, and how long there is; sources of --preemption-notice
    poller.py    looks at a file or an address, every second or two

Start with notice.py. What a job does about a notice is in launcher/elastic/departures.py.
"""
