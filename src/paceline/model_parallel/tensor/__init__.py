"""Tensor parallel without writing a plan: layers are cut over the tp axis of a mesh."""

from paceline.model_parallel.tensor.parallelize import parallelize, tensor_plan
from paceline.model_parallel.tensor.plan import TensorPlan

__all__ = ["TensorPlan", "parallelize", "tensor_plan"]
