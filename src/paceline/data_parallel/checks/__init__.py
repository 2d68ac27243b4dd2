"""Checks before and during training, and the errors that follow.

model.py runs before the first step, gradients.py in each step, free_running.py at free-running
paces.
"""
