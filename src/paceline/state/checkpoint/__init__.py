"""pl.Checkpoint: save a running job now and then, and resume from a checkpoint.

Start with checkpoint.py. contents.py has what a worker saves and loads, writer.py writes in the
background, quiesce.py pauses free-running workers for a save.
"""
