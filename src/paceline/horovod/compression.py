"""Compression of tensors of TensorFlow, Keras, JAX or numpy: none, or 16-bit floats."""

from __future__ import annotations

import sys
from typing import Any

import torch


class Compressor:
    """Changes a tensor before it is sent, and back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor as it was."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:  # noqa: ARG004
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        dtype = _name(tensor.dtype)
        if "float" not in dtype:
            return tensor, None
        return _cast(tensor, "float16"), dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else _cast(tensor, ctx)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor


def _name(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _cast(tensor: Any, dtype: str) -> Any:
    if isinstance(tensor, torch.Tensor):
        return tensor.to(getattr(torch, dtype))
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(tensor):
        return tf.cast(tensor, dtype)
    return tensor.astype(dtype)
