"""The kinds of data that pl.shard accepts, and one pass over each.

Start with sources.py. indexed.py reads a DataLoader whose samples have indices, stream.py data that
only comes in sequence.
"""
