"""The progress of each pass over the data, and what remains of it.

Start with cursor.py (a fixed order) and leased.py (portions leased from the coordinator).
progress.py has the loaders and loops of a job as state for newcomers; resumption.py continues from
a checkpoint."""
