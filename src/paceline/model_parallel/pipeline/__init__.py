"""Pipeline parallel: a model is cut into stages, and microbatches flow through them.

Start with pipeline.py. schedules.py orders the microbatches, tracing.py and recorder.py record a
forward pass, splitting.py and partitioning.py cut it into stages.
"""
