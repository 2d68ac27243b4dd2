"""Averages of sparse gradients, which `nn.Embedding(sparse=True)` and its like produce.

A sparse gradient has as many entries as its rank's batch touched, so there is no flat memory that
ranks could reduce in place. Instead every rank gathers the entries of all ranks and adds them up
itself, in rank order: the same additions on the same numbers give the same bits everywhere.

    1. sizes       number of entries, and a fingerprint of dtype and shape
    2. indices     concatenated in rank order
    3. values      concatenated in rank order; then entries of the same index are added

Gradients on a device are averaged in host memory, with the same bits. The host waits for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.devices import is_on_device
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.data_parallel.bucket import NamedParameter, describe
from paceline.errors import InconsistentRanks, PeerError, UsageError


class SparseAverages:
    """The parameters of one training whose gradients are sparse."""

    def __init__(self, group: Group, *, keeps: bool) -> None:
        self._group = group
        self._gradients = SparseGradients(group)
        self._keeps = keeps
        self.parameters: list[NamedParameter] = []
        self.contributions: dict[str, Tensor] = {}  # this worker's own, if they are kept

    def average(self, shares: Sequence[float]) -> None:
        """Average the gradients of parameters that any worker has one for.

        If a worker is lost meanwhile, they are restored.
        """
        own = [named.param.grad for named in self.parameters]
        self.contributions.clear()
        try:
            for named, share in zip(self.parameters, shares, strict=True):
                if share:
                    self._average_one(named)
        except PeerError:
            for named, grad in zip(self.parameters, own, strict=True):
                named.param.grad = grad
            raise

    def _average_one(self, named: NamedParameter) -> None:
        param = named.param
        grad = _nothing(param) if param.grad is None else _to_host(param.grad)
        if self._keeps:
            self.contributions[named.name] = grad.clone()
        if grad.is_sparse:
            param.grad = _to(param.device, self._gradients.average(grad))
        else:  # the weight is tied to a layer that uses it densely
            averaged = torch.empty_like(grad)
            self._group.all_reduce(grad, "mean", out=averaged)
            param.grad = averaged.to(param.device)


def _nothing(param: Tensor) -> Tensor:
    """Return the gradient of a parameter that was not used: without entries, on the CPU."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64),
        torch.empty(0, *param.shape[1:], dtype=param.dtype),
        param.shape,
        check_invariants=False,
    )


def _to_host(grad: Tensor) -> Tensor:
    """Return a gradient in host memory; its entries are coalesced there."""
    if not is_on_device(grad):
        return grad
    if not grad.is_sparse:
        return grad.cpu()
    parts = grad._indices().cpu(), grad._values().cpu()
    return torch.sparse_coo_tensor(*parts, grad.shape, check_invariants=False)


def _to(device: torch.device, grad: Tensor) -> Tensor:
    """Return a coalesced gradient on this device."""
    if device == grad.device:
        return grad
    parts = grad.indices().to(device), grad.values().to(device)
    return torch.sparse_coo_tensor(*parts, grad.shape, is_coalesced=True, check_invariants=False)


class SparseGradients:
    """Averages the sparse gradients of a group's ranks. Collective and blocking."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def average(self, grad: Tensor) -> Tensor:
        """Return the mean of all ranks' gradients as a coalesced tensor, the same on all ranks.

        A rank without entries passes an empty sparse tensor of the same shape and dtype.
        InconsistentRanks, on all ranks, when shapes or dtypes differ.
        """
        is_sparse = grad.layout is torch.sparse_coo
        grad = grad.detach().coalesce() if is_sparse else grad
        counts = self._counts(grad, grad._nnz() if is_sparse else 0)
        if not is_sparse:
            raise UsageError(
                f"rank {self._group.ranks[self._group.rank]} averages sparse gradients, but got"
                f" {_describe(grad)}"
            )
        indices, values = grad.indices(), grad.values()
        if sum(counts):
            gathered = [indices.new_empty(len(indices), count) for count in counts]
            self._group.all_gather(indices, out=gathered)
            indices = torch.cat(gathered, dim=1)
            gathered = [values.new_empty(count, *values.shape[1:]) for count in counts]
            self._group.all_gather(values, out=gathered)
            values = torch.cat(gathered)
        return _mean(indices, values, grad.shape, self._group.size)

    def _counts(self, grad: Tensor, count: int) -> list[int]:
        """Return the number of entries of each rank, after checking that the ranks agree."""
        digest = hashlib.blake2b(_describe(grad).encode(), digest_size=8).digest()
        fingerprint = int.from_bytes(digest, "little", signed=True)
        gathered = torch.empty(self._group.size, 2, dtype=torch.int64)
        self._group.all_gather(torch.tensor([count, fingerprint]), out=gathered)
        if bool((gathered[:, 1] != fingerprint).any()):
            self._refuse(grad)
        return gathered[:, 0].tolist()

    def _refuse(self, grad: Tensor) -> None:
        ranks_by_kind: dict[str, list[int]] = {}
        for rank, kind in zip(
            self._group.ranks, all_gather_object(self._group, _describe(grad)), strict=True
        ):
            ranks_by_kind.setdefault(kind, []).append(rank)
        found = "; ".join(
            f"{kind} on rank {', '.join(map(str, on))}" for kind, on in ranks_by_kind.items()
        )
        raise InconsistentRanks(
            f"rank {self._group.ranks[self._group.rank]} averages a sparse gradient whose kind"
            f" differs from rank to rank: {found}. Build the same model on every rank",
            sides=tuple(map(tuple, ranks_by_kind.values())),
        )


def _describe(grad: Tensor) -> str:
    if grad.layout is torch.sparse_coo:
        return f"sparse {describe(grad)} with {grad.sparse_dim()} sparse dimensions"
    return f"{str(grad.layout).removeprefix('torch.')} {describe(grad)}"


def _mean(indices: Tensor, values: Tensor, shape: torch.Size, num_ranks: int) -> Tensor:
    """Add up entries of the same index and divide once; half precision is rounded once."""
    is_half = values.dtype in (torch.float16, torch.bfloat16)
    wide = values.float() if is_half else values
    # Indices come from checked tensors of the same shape.
    summed = torch.sparse_coo_tensor(indices, wide, shape, check_invariants=False).coalesce()
    mean = (summed.values() / num_ranks).to(values.dtype)
    return torch.sparse_coo_tensor(
        summed.indices(), mean, shape, is_coalesced=True, check_invariants=False
    )
