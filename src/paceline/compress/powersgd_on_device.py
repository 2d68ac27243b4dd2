"""PowerSGD on a device: factors are computed there, and averaged by the device's own collectives.

The operations are those of powersgd.py, on the same state, so workers find the same factors as on
the CPU but for rounding: 1e-5 of the largest value, because products and the orthogonal matrix are
added up in another order. The host waits for nothing. It does not know whether numbers were finite:
the device selects.

    current stream     residual + gradients, left factors
    stream of its own  ... average, orthonormal, right factors ... average, product, residual
"""

from __future__ import annotations

import torch

from paceline.comm.device_group import DeviceGroup, StreamResult
from paceline.compress.powersgd import PowerSGDReduction


class PowerSGDOnDevice:
    """The mean of one bucket. Moves the state of its reduction to the device."""

    def __init__(self, reduction: PowerSGDReduction, collectives: DeviceGroup) -> None:
        device = collectives.device
        self._reduction, self._collectives = reduction, collectives
        self._after = torch.Stream(device)
        reduction.move(device)
        self._matrices, self._layout = reduction.matrices, reduction.layout
        self._lefts, self._left_memory = reduction.empty_factors(0, device)
        self._rights, self._right_memory = reduction.empty_factors(1, device)

    @torch.no_grad()
    def submit(self, grads: torch.Tensor, averaged: torch.Tensor, step: int) -> StreamResult:
        """Start to compute the mean of the workers' gradients; return a Handle.

        It writes the residual: the current stream waits for it before the next call.
        """
        reduction, collectives = self._reduction, self._collectives
        reduction.take_encoded(step)
        begin, wanted = reduction.begin, reduction.wanted
        for number, matrix in enumerate(self._matrices):
            own = matrix.span.of(wanted)
            if reduction.residual is None:
                own.copy_(matrix.span.of(grads))
            else:
                own.add_(matrix.span.of(grads))
            torch.matmul(matrix.view(wanted), begin[number], out=self._lefts[number])
        works = [collectives.all_reduce(self._left_memory)]
        small = torch.cat([span.of(grads) for span in self._layout.small] or [wanted[:0]])
        if small.numel():
            works.append(collectives.all_reduce(small))
        done = torch.Event(collectives.device)
        with self._after:
            for work in works:
                work.wait()
            self._finish(averaged)
            self._layout.unpack_small(small.div_(collectives.size), averaged)
            done.record(self._after)
        reduction.account_step(collectives.size)
        return StreamResult(done, small)

    def _finish(self, averaged: torch.Tensor) -> None:
        """Continue on the current stream with the sum of the left factors."""
        reduction, size = self._reduction, self._collectives.size
        is_finite = torch.isfinite(self._left_memory.div_(size)).all()
        for number, matrix in enumerate(self._matrices):
            left = self._lefts[number]
            basis = torch.linalg.qr(torch.where(is_finite, left, 0.0))[0]
            left.copy_(torch.where(is_finite, basis, left))  # all workers see what is not finite
            torch.matmul(matrix.view(reduction.wanted).t(), left, out=self._rights[number])
        self._collectives.all_reduce(self._right_memory).wait()
        self._right_memory.div_(size)
        for number, matrix in enumerate(self._matrices):
            left, right, begin = self._lefts[number], self._rights[number], reduction.begin[number]
            torch.matmul(left, right.t(), out=matrix.view(averaged))
            begin.copy_(torch.where(is_finite, right, begin))
            own = matrix.span.of(reduction.wanted)
            if reduction.residual is not None:
                own.sub_(matrix.span.of(averaged))
            own.copy_(torch.where(is_finite, own, 0.0))
