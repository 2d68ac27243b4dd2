"""Which process holds which part of a model, and the full state from all parts.

Start with layout.py. slicing.py cuts a full model, gather.py puts parts together, checkpoint.py is
what a checkpoint holds.
"""
