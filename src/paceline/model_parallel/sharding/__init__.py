"""Which process holds which shard of a model, and the full state from all shards.

Start with layout.py. model_shard.py shards a full model, gather.py assembles full tensors,
checkpoint.py is what a checkpoint holds.
"""
