"""NamedReductions: how the buckets of a DistributedOptimizer are reduced, by named operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import CollectiveMismatch, HorovodInternalError
from paceline.horovod.handles import Pending
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.torch import start
from paceline.pace.allreduce import COMPOUND
from paceline.pace.exchange import Exchange
from paceline.runtime.work import Handle


class NamedReductions(Exchange):
    """Reduces each bucket as one named operation."""

    traits = COMPOUND

    def __init__(
        self, prefix: str, op: int, predivide: float, compression: Any, process_set: ProcessSet
    ) -> None:
        self._prefix, self._op, self._compression = prefix, op, compression
        self._scales = (1.0 / predivide, predivide)
        self._process_set = process_set

    def submit(self, bucket: Any, step: int) -> Handle:  # noqa: ARG002
        name = f"{self._prefix}.{bucket.label}"
        params = ", ".join(f"{slot.name} {list(slot.segment.shape)}" for slot in bucket.slots)
        sent, context = self._compression.compress(bucket.grads)
        if sent is bucket.grads:
            return _Waiting(self._start(sent, bucket.averaged, name, params), params)
        pending = self._start(sent, torch.empty_like(sent), name, params)
        return _Waiting(
            pending,
            params,
            lambda out: bucket.averaged.copy_(self._compression.decompress(out, context)),
        )

    def _start(self, sent: torch.Tensor, out: torch.Tensor, name: str, params: str) -> Pending:
        # Gradients of other shapes may fill a bucket of the same size: the shapes are compared.
        return start.start_allreduce(
            sent, out, name, self._op, self._scales, self._process_set, described=params
        )


class _Waiting:
    """A Pending as the reducer waits for it."""

    def __init__(
        self, pending: Pending, params: str, use: Callable[[Any], object] = lambda _: None
    ) -> None:
        self._pending, self._params, self._use = pending, params, use

    def done(self) -> bool:
        return self._pending.done()

    def wait(self, timeout_s: float | None = None) -> object:  # noqa: ARG002
        try:
            return self._use(self._pending.result())
        except HorovodInternalError as error:
            if not isinstance(error.__cause__, CollectiveMismatch):
                raise
            raise HorovodInternalError(
                f"{error} This rank's gradients in it: {self._params}. Every rank must give its"
                " DistributedOptimizer parameters of the same names, shapes and order."
            ) from error.__cause__

    def error(self) -> Exception | None:
        return None
