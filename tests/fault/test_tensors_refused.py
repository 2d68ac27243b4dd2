"""Tensors that the engine cannot move are refused early; odd ones come out right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

# name: (what makes it, what the error must say)
REFUSED = {
    "meta device": (lambda: torch.ones(3, device="meta"), "is on meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_coo().coalesce().to_sparse(sparse_dim=2), "sparse"),
    "complex64": (lambda: torch.ones(3, dtype=torch.complex64), "complex64"),
    "complex128": (lambda: torch.ones(3, dtype=torch.complex128), "view it as real"),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "complex array": (lambda: np.ones(3, dtype=np.complex64), "complex64"),
    "strings": (lambda: np.array(["a", "b"]), "<U1"),
    "objects": (lambda: np.array([object()]), "object"),
    "other byte order": (lambda: np.ones(3, dtype=">f4"), ">f4"),
    "dates": (lambda: np.array(["2026-01-01"], dtype="datetime64[D]"), "datetime64"),
}
NOT_TENSORS = {"list": [1.0, 2.0], "number": 3.0, "none": None, "text": "tensor"}


def test_unsupported_tensors_name_what_is_wrong() -> None:
    def body(group: Group) -> None:
        other = 1 - group.rank
        for name, (make, text) in REFUSED.items():
            tensor = make()
            for call in (
                lambda t: group.all_reduce(t),
                lambda t: group.broadcast(t, 0),
                lambda t: group.all_gather(t),
                lambda t: group.all_to_all([t, t]),
                lambda t: group.send(t, other),
                lambda t: group.recv(t, other),
            ):
                with pytest.raises(pl.errors.UnsupportedTensor) as caught:
                    call(tensor)
                assert text in str(caught.value), (name, caught.value)
        for name, thing in NOT_TENSORS.items():
            with pytest.raises(pl.errors.UsageError, match=type(thing).__name__):
                group.all_reduce(thing)
                raise AssertionError(name)
        for op in ("band", "bor", "bxor"):
            with pytest.raises(pl.errors.UnsupportedTensor, match="integers and bool"):
                group.all_reduce(torch.ones(2), op)
        with pytest.raises(pl.errors.UnsupportedTensor, match="mean of int64"):
            group.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
        assert group.all_reduce(torch.ones(1)).item() == 2  # none of it reached the others

    run_ranks(2, body)


def test_tensors_that_are_not_what_their_memory_says() -> None:
    def body(group: Group) -> None:
        # The imaginary part of a conjugate is a view with a sign that is not in memory.
        imaginary = torch.complex(torch.ones(4), torch.full((4,), 2.0)).conj().imag
        assert imaginary.is_neg()
        assert group.all_reduce(imaginary.clone(), "sum").tolist() == [-4.0] * 4
        assert [x.tolist() for x in group.all_gather(imaginary)] == [[-2.0] * 4] * 2
        negative = torch._neg_view(torch.ones(4))
        assert [x.tolist() for x in group.all_gather(negative)] == [[-1.0] * 4] * 2
        group.all_reduce(negative)
        assert negative.tolist() == [-2.0] * 4
        # Elements that share memory can be read, but not written one by one.
        wide = torch.tensor([float(group.rank)]).expand(6)
        assert [x.tolist() for x in group.all_gather(wide)] == [[0.0] * 6, [1.0] * 6]
        # Parameters, without a trace in autograd.
        weight = torch.nn.Parameter(torch.ones(5, 7))
        group.all_reduce(weight)
        group.all_reduce(weight.t())
        assert weight.requires_grad and weight.is_leaf and bool((weight == 4).all())

    run_ranks(2, body)
