"""pl.Checkpoint: save a running job now and then, and resume from a checkpoint.

Start with checkpoint.py. contents.py has what a worker saves and loads, background_writer.py calls
state/files/save.py in a thread, quiesce.py pauses free-running workers for a save.
"""
