"""What is checked before and during training, and the errors that follow.

model.py and consistency.py run before the first step, non_finite.py and backward_errors.py in each
step, free_running.py at free-running paces.
"""
