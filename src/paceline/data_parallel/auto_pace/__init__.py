"""`pace="auto"` and `--max-wire`: the planner in a running job.

Start with auto_pace.py: the workers measure their first steps, meet, and take the same decision
after the same step. measurement.py has what one worker measures; planner/automatic decides.
"""
