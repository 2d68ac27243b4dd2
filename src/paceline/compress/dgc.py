"""Deep gradient compression: the largest values of a momentum that each worker keeps for itself.

    u <- m u + g;  v <- v + u;  send the k largest of v;  where sent, v <- 0 and u <- 0

The momentum is inside of what is chosen from (momentum correction), and stops where its value has
been sent (factor masking), so the optimizer must have none of its own. In the first steps more is
sent (`warmup`): the fraction falls in five stages. `clip` bounds the norm of each flat tensor of a
worker by clip / sqrt(workers).

Lin et al. 2018, arXiv 1712.01887.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collectives.group import Group
from paceline.compress import kernels
from paceline.compress.chosen import TopK
from paceline.compress.codec import Ground
from paceline.compress.draw import Draw
from paceline.compress.gathered import Gathered
from paceline.compress.parse import CodecSpec
from paceline.work import Work

_STAGES = 5


class DeepGradient(TopK):
    """The largest values of a momentum."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.momentum = spec.option("momentum", 0.9)
        self.warmup = int(spec.option("warmup", 500))
        self.clip = spec.option("clip", 0.0)
        self.has_feedback = True
        self.share = self.share_at(0)

    def share_at(self, step: int) -> float:
        """Return the fraction that is sent in a step."""
        if step >= self.warmup:
            return self.spec.value
        stage = 1 + step * _STAGES // self.warmup
        return float(self.spec.value ** (stage / (_STAGES + 1)))

    def journey(self, ground: Ground) -> Gathered:
        return _WithMomentum(self, ground)

    def find_problem(self, optimizer: torch.optim.Optimizer) -> str:
        if not self.momentum:
            return ""
        is_sgd = isinstance(optimizer, torch.optim.SGD)
        if is_sgd and not any(group["momentum"] for group in optimizer.param_groups):
            return ""
        has = "a momentum of its own" if is_sgd else "a memory of its own"
        return (
            f"codec {self.spec} has a momentum of {self.momentum:g}, and the optimizer"
            f" ({type(optimizer).__name__}) {has}: use SGD without momentum, dgc(momentum=0), or"
            " topk, which leaves momentum to the optimizer"
        )


class _WithMomentum(Gathered):
    """One flat tensor."""

    codec: DeepGradient

    def __init__(self, codec: DeepGradient, ground: Ground) -> None:
        super().__init__(codec, ground)
        self._velocity = torch.zeros(self.layout.size)
        self._share = codec.share
        self._num_workers = 1

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        codec = self.codec
        codec.share = codec.share_at(draw.step)
        if codec.share != self._share:
            self._share = codec.share
            self.resize()
        if codec.clip:
            limit = codec.clip / self._num_workers**0.5
            size = float(torch.linalg.vector_norm(values))
            values = values * (limit / size) if size > limit else values
        assert self.residual is not None
        for number, span in enumerate(self.layout.large):
            velocity, k = span.of(self._velocity), codec.count(span.count)
            velocity.mul_(codec.momentum).add_(span.of(values))
            indices, chosen = torch.empty(k, dtype=torch.int32), torch.empty(k)
            residual, here = span.of(self.residual), draw.at(span.start)
            kernels.select(velocity, k, indices, chosen, residual=residual, draw=here)
            velocity.index_fill_(0, indices.long(), 0.0)
            payload = self._part(self._payload, number)
            codec.pack(payload, span.count, indices, chosen, residual, here)

    def hop(self, group: Group) -> Work[Sequence[torch.Tensor]]:
        self._num_workers = group.size
        return super().hop(group)

    def write(self, out: torch.Tensor) -> None:
        self.codec.share = self._share  # another tensor may be a step further
        super().write(out)

    def forget(self) -> None:
        super().forget()
        self._velocity.zero_()
