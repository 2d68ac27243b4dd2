"""How far each pass over the data is, and what is left of it.

Start with cursor.py (a fixed order) and leased.py (portions leased from the coordinator). ledger.py
collects the loaders of a job as state for newcomers; resumption.py continues from a checkpoint.
"""
