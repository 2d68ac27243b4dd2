"""Compression of single tensors and of gradients: none, or 16-bit floats."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UsageError


class Compressor:
    """Changes a tensor before it is sent, and back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor as it was."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        is_float = tensor.dtype.is_floating_point
        return (tensor.to(torch.float16) if is_float else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


def check_compression(compression: Any) -> None:
    """Raise UsageError unless this is a compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise UsageError(
            f"compression={compression!r}: pass hvd.Compression.none, hvd.Compression.fp16 or a"
            " class with the static methods compress and decompress"
        )


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
