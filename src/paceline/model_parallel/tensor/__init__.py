"""Tensor parallel with an automatic plan: layers are sharded over the tp axis of a mesh.

Start with parallelize.py: trace, shard, probe, keep or revert. plan.py holds the plan, styles.py
how one module is sharded, sharded_tensor.py the tensor that a sharded layer returns.
"""
