"""Tensor parallel without writing a plan: layers are cut over the tp axis of a mesh.

Start with parallelize.py: recognise, cut, probe, keep or revert. plan.py holds the plan, styles.py
how one module is cut, sharded_tensor.py the tensor that a cut layer returns.
"""

from paceline.model_parallel.tensor.parallelize import parallelize, tensor_plan
from paceline.model_parallel.tensor.plan import TensorPlan

__all__ = ["TensorPlan", "parallelize", "tensor_plan"]
