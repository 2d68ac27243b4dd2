"""Pipeline parallel: a model is split into stages, and microbatches pass through them.

Start with pipeline.py. schedules.py orders the microbatches and schedule_runner.py runs them;
tracing.py and recorder.py record a forward pass; partitioning.py chooses where to split it, and
splitting.py does so. transfer.py sends tensors from stage to stage; stage_links.py: on a device.
"""
