"""Deep gradient compression: the largest values of a momentum that each worker keeps.

    u <- m u + g;  v <- v + u;  send the k largest of v;  where sent, v <- 0 and u <- 0

The values are selected from the accumulated momentum (momentum correction), and the momentum is
reset where its value was sent (factor masking). The optimizer must therefore have no momentum. The
first steps send more (`warmup`): the fraction falls in five stages. `clip` bounds the norm of each
flat tensor of a worker by clip / sqrt(workers).

Lin et al. 2018, arXiv 1712.01887.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.comm.group import Group
from paceline.compress import sparse_format as sparse
from paceline.compress.codec import CodecContext, make_codec
from paceline.compress.kernels import Draw
from paceline.compress.packet import Packet
from paceline.compress.reduction import AllGatherReduction
from paceline.compress.registry import CodecSpec, parse_codec
from paceline.compress.sparsifiers import TopK
from paceline.runtime.work import Work

_STAGES = 5


class DeepGradient(TopK):
    """The largest values of a momentum."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.momentum = spec.option("momentum")
        self.warmup = int(spec.option("warmup"))
        self.clip = spec.option("clip")
        self.has_feedback = True
        self.share = self.share_at(0)

    def share_at(self, step: int) -> float:
        """Return the fraction that is sent in a step."""
        if step >= self.warmup:
            return self.spec.value
        stage = 1 + step * _STAGES // self.warmup
        return float(self.spec.value ** (stage / (_STAGES + 1)))

    def clipped(self, values: torch.Tensor, num_workers: int) -> torch.Tensor:
        """Return the values, scaled down if their norm exceeds the limit of a worker."""
        if not self.clip:
            return values
        limit, size = self.clip / num_workers**0.5, float(torch.linalg.vector_norm(values))
        return values * (limit / size) if size > limit else values

    def choose(
        self,
        values: torch.Tensor,
        velocity: torch.Tensor,
        residual: torch.Tensor,
        payload: torch.Tensor,
        draw: Draw,
    ) -> None:
        """Write the largest accumulated values to `payload`, and reset both states there."""
        k = self.count(values.numel())
        velocity.mul_(self.momentum).add_(values)
        indices, chosen = torch.empty(k, dtype=torch.int32), torch.empty(k)
        sparse.select(velocity, k, indices, chosen, residual=residual, draw=draw)
        velocity.index_fill_(0, indices.long(), 0.0)
        self.pack(payload, values.numel(), indices, chosen, residual, draw)

    def reduction(self, context: CodecContext) -> AllGatherReduction:
        return _MomentumReduction(self, context)

    def packet(self, context: CodecContext) -> Packet:
        return _MomentumPacket(self, context)

    def find_problem(self, optimizer: torch.optim.Optimizer) -> str:
        if not self.momentum:
            return ""
        is_sgd = isinstance(optimizer, torch.optim.SGD)
        if is_sgd and not any(group["momentum"] for group in optimizer.param_groups):
            return ""
        has = "its own momentum" if is_sgd else "its own state"
        return (
            f"codec {self.spec} has a momentum of {self.momentum:g}, and the optimizer"
            f" ({type(optimizer).__name__}) has {has}: use SGD without momentum, dgc(momentum=0),"
            " or topk, which leaves momentum to the optimizer"
        )


class _MomentumReduction(AllGatherReduction):
    """A reduction with a momentum."""

    codec: DeepGradient

    def __init__(self, codec: DeepGradient, context: CodecContext) -> None:
        super().__init__(codec, context)
        self._velocity = torch.zeros(self.layout.size)
        self._share = codec.share
        self._num_workers = 1

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        codec = self.codec
        codec.share = codec.share_at(draw.step)
        if codec.share != self._share:
            self._share = codec.share
            self.resize()
        values = codec.clipped(values, self._num_workers)
        assert self.residual is not None
        for number, span in enumerate(self.layout.large):
            payload = self._part(self._payload, number)
            flats = (span.of(values), span.of(self._velocity), span.of(self.residual))
            codec.choose(*flats, payload, draw.at(span.start))

    def hop(self, group: Group) -> Work[Sequence[torch.Tensor]]:
        self._num_workers = group.size
        return super().hop(group)

    def write(self, out: torch.Tensor) -> None:
        self.codec.share = self._share  # another tensor may be one step ahead
        super().write(out)

    def own(self) -> Iterator[torch.Tensor]:
        yield from super().own()
        yield self._velocity

    def forget(self) -> None:
        super().forget()
        self._velocity.zero_()


class _MomentumPacket(Packet):
    """A packet with a momentum; the server decodes it as topk."""

    codec: DeepGradient

    def __init__(self, codec: DeepGradient, context: CodecContext) -> None:
        super().__init__(codec, context)
        self._velocity = torch.zeros(self.layout.size)
        self._share = codec.share_at(0)
        self._num_workers = context.num_workers
        self.resize(make_codec(parse_codec(self.form)))

    @property
    def form(self) -> str:
        spec = self.codec.spec
        options = {key: value for key, value in spec.options.items() if key == "min"}
        return str(CodecSpec("topk", self._share, options, spec.values))

    @property
    def kept(self) -> Sequence[torch.Tensor]:
        return (*super().kept, self._velocity)

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        codec = self.codec
        codec.share = codec.share_at(draw.step)
        if codec.share != self._share:
            self._share = codec.share
            self.resize(make_codec(parse_codec(self.form)))
        values = codec.clipped(values, self._num_workers)
        assert self.residual is not None
        for number, span in enumerate(self.layout.large):
            payload = self.contents.part(self.payload, number)
            flats = (span.of(values), span.of(self._velocity), span.of(self.residual))
            codec.choose(*flats, payload, draw.at(span.start))
