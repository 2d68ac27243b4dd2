"""What collectives must compute: inputs that every rank can reproduce, folded with numpy.

Floating-point inputs are small whole numbers (or powers of two for products), whose sums are exact
in every order; so results are compared bit by bit wherever the ranks run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATING = ("float32", "float64", "float16", "bfloat16")
DTYPES = {name: getattr(torch, name) for name in (*FLOATING, *_INTEGERS, "bool")}
ARITHMETIC = ("sum", "min", "max", "product")
BITWISE = ("band", "bor", "bxor")


def ops_of(dtype: str) -> tuple[str, ...]:
    """Return the reductions that make sense for a dtype."""
    return (*ARITHMETIC, "mean") if dtype in FLOATING else (*ARITHMETIC, *BITWISE)


def values(rank: int, count: int, dtype: str, op: str = "sum", seed: int = 0) -> torch.Tensor:
    """Return the input of one rank; the same wherever it is asked for."""
    random = np.random.default_rng([seed, rank, count])
    if dtype in FLOATING:
        source = [-1.0, 1.0, 0.5, 2.0] if op == "product" else range(-4, 5)
        chosen = random.integers(0, len(source), size=count, dtype=np.int8)
        array = np.array(source, dtype=np.float32)[chosen]
        return torch.from_numpy(array).to(DTYPES[dtype])
    if dtype == "bool":
        return torch.from_numpy(random.integers(0, 2, size=count).astype(bool))
    size = np.dtype(dtype).itemsize
    return torch.from_numpy(np.frombuffer(bytearray(random.bytes(count * size)), dtype=dtype))


def fold(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Combine the inputs in rank order; half precision is added in float32 and rounded once."""
    dtype = inputs[0].dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    arrays = [(x.float() if is_half else x).numpy() for x in inputs]
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = _combine(total, array, op)
    if op == "mean":
        total = total / total.dtype.type(len(inputs))
    return torch.from_numpy(np.ascontiguousarray(total)).to(dtype)


def _combine(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    is_bool = a.dtype == np.bool_
    if op in ("sum", "mean"):
        return a | b if is_bool else a + b
    if op == "product":
        return a & b if is_bool else a * b
    functions = {"min": np.minimum, "max": np.maximum}
    bitwise = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
    return {**functions, **bitwise}[op](a, b)


def bits(tensor: torch.Tensor | np.ndarray) -> bytes:
    """Return the memory of a tensor, to compare without regard to what numbers mean."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    if tensor.numel() == 0:
        return b""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def require_same(found: torch.Tensor | np.ndarray, expected: torch.Tensor, what: str) -> None:
    """Assert that two tensors are equal bit by bit, and show where they are not."""
    assert tuple(found.shape) == tuple(expected.shape), f"{what}: {found.shape}, {expected.shape}"
    if bits(found) == bits(expected):
        return
    size = expected.element_size()
    a, b = (np.frombuffer(bits(x), dtype=np.uint8).reshape(-1, size) for x in (found, expected))
    wrong = np.nonzero((a != b).any(axis=1))[0]
    flat = (
        found.reshape(-1)
        if isinstance(found, torch.Tensor)
        else torch.from_numpy(found).reshape(-1)
    )
    at = int(wrong[0])
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(a)} elements differ, first at {at}:"
        f" {flat[at]}, expected {expected.reshape(-1)[at]}"
    )
