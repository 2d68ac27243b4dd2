"""Pipeline: trains and evaluates a model whose stages are in several processes.

    rank 0:  F0 F1    B0 F2 B1 ...         all processes are given the same batch; the first stage
    rank 1:     F0 B0 F1 B1 ...            uses the inputs, the last one the targets

A batch is cut into microbatches, so that stages have something to do at the same time; gradients
are those of the mean loss over the whole batch. Two things are other than in one process, as with
any pipeline: BatchNorm takes its statistics from microbatches, and dropout draws other numbers.

Orders of work come from torch.distributed.pipelining (schedules.py), running them is our own:
torch's stages send Python objects (pickles) to agree on shapes, do that only once, and refuse
stages that change their inputs in place or return views.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import PeerError, UsageError
from paceline.model_parallel.pipeline.batches import (
    are_of_rows,
    count_microbatches,
    cut,
    join,
    rows_of,
    sizes_of_parts,
)
from paceline.model_parallel.pipeline.flow import Finish, Flow
from paceline.model_parallel.pipeline.schedules import forward_order, indices_of, order_of, owners
from paceline.model_parallel.pipeline.shared import Shared
from paceline.model_parallel.pipeline.stage import Stage
from paceline.model_parallel.pipeline.transfer import (
    DTYPES,
    Batch,
    Like,
    Wire,
    blank,
    decode,
    encode,
)
from paceline.observe.telemetry.trace import Stopwatch

_WHOLE = -1  # instead of a number of outputs: they are not of rows, so evaluate the batch as one


class Pipeline:
    """The stages that this process holds, connected with those of the others.

    `stages` and their `indices` are those that the schedule gives to this rank of the group (the pp
    axis): `indices_of`. All processes construct it together, and make the same calls with the same
    batches. `loss(output, target)` returns the mean over what it is given; without a loss the
    model's own output is the loss. `shared` names parameters that several stages use.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        indices: Sequence[int],
        num_stages: int,
        group: dist.ProcessGroup | DeviceMesh,
        loss: Callable[..., Tensor] | None = None,
        schedule: str = "1f1b",
        microbatches: int | str = "auto",
        shared: Mapping[str, Sequence[int]] = {},
    ) -> None:
        self._group: Any = _group_of(group)
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._schedule, self._loss, self._asked = schedule, loss, microbatches
        self._owners = owners(schedule, self._num_ranks)
        self._check(stages, indices, num_stages)
        self._num_stages, self._last = num_stages, num_stages - 1
        self._stages = {i: Stage(s, i) for i, s in zip(indices, stages, strict=True)}
        self._has_last = self._last in self._stages
        self._unflatten: Callable[[Any], Any] = stages[-1].unflatten  # type: ignore[assignment]
        self._wire = Wire(self._group, self._owners)
        modules = dict(zip(indices, stages, strict=True))
        self._shared = Shared(modules, self._owners, self._group, shared)
        self.modules = tuple(stages)
        self.prepare: Callable[[tuple[Any, ...]], None] = lambda _: None  # see inputs before a pass
        self._is_of_rows = True  # the model's output has a row for each row of a batch
        # Processes are seeded alike, but stages must not drop the same elements. The generator of
        # the process itself stays as it is: samplers use it, and must draw alike.
        seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (indices[0] + 1)) % (1 << 63)
        # Between calls: what a checkpoint keeps, and puts back.
        self.random_state = torch.Generator().manual_seed(seed).get_state()

    def _check(self, stages: Sequence[nn.Module], indices: Sequence[int], num_stages: int) -> None:
        expected = indices_of(self._schedule, self._rank, self._num_ranks)
        if num_stages != len(self._owners) or list(indices) != expected or not stages:
            raise UsageError(
                f"pipeline: rank {self._rank} of {self._num_ranks} holds stages {list(indices)} of"
                f" {num_stages}; schedule {self._schedule!r} needs it to hold {expected} of"
                f" {len(self._owners)}"
            )
        if self._asked != "auto" and (not isinstance(self._asked, int) or self._asked < 1):
            raise UsageError(
                f"microbatches={self._asked!r}: pass a number of at least 1, or 'auto'"
            )

    def watch_waits(self, waiting: Stopwatch) -> None:
        """Add the seconds for which this process waits for other stages to these."""
        self._wire.waiting = waiting

    # -- training -----------------------------------------------------------------------------

    def forward_backward(
        self, inputs: tuple[Tensor, ...], targets: Any = None, scale: float = 1.0
    ) -> Tensor:
        """Add the gradients of a batch's mean loss to the parameters'; return the loss.

        Every process of the pipeline returns the same loss, detached. Gradients are multiplied by
        `scale`, the loss is not. Blocks until the gradients of the local stages are complete.
        """
        rows = rows_of(inputs, targets)
        count = count_microbatches(rows, self._asked, self._schedule, self._num_ranks)
        order = order_of(self._schedule, self._rank, self._num_ranks, count)
        losses: list[Tensor] = []
        with self._together(), torch.enable_grad():
            self._shared.set_aside()
            finish = self._into(losses, cut(targets, rows, count))
            self._flow(inputs, Batch(rows, count), finish).run(order, scale)
            self._shared.add_up(self._wire.waiting)
            return self._tell_loss(losses, [1 / count] * count)

    # -- evaluating ---------------------------------------------------------------------------

    def evaluate(self, inputs: tuple[Tensor, ...]) -> Any:
        """Return the whole model's output, in its own structure, on every process.

        Without gradients, for a batch of any size.
        """
        rows = rows_of(inputs)
        with self._together(), torch.no_grad():
            while True:
                count = self._num_parts(rows) if self._is_of_rows else 1
                made = self._outputs_of(inputs, Batch(rows, count))
                outputs = self._tell_outputs(made, rows, count)
                if outputs is not None:
                    return self._unflatten(outputs)
                # Parts of something else than rows cannot be put together; go through as one.
                self._is_of_rows = False

    def evaluate_loss(self, inputs: tuple[Tensor, ...], targets: Any = None) -> Tensor:
        """Return the mean loss over a batch of any size, on every process, without gradients."""
        rows = rows_of(inputs, targets)
        count, losses = self._num_parts(rows), list[Tensor]()
        with self._together(), torch.no_grad():
            finish = self._into(losses, cut(targets, rows, count))
            self._flow_forward(inputs, Batch(rows, count), finish)
            return self._tell_loss(losses, [n / rows for n in sizes_of_parts(rows, count)])

    def _num_parts(self, rows: int) -> int:
        most = 4 * self._num_ranks if self._asked == "auto" else int(self._asked)
        return min(rows, most)

    # -- through the stages -------------------------------------------------------------------

    def _flow(
        self, inputs: tuple[Tensor, ...], batch: Batch, finish: Finish, is_even: bool = True
    ) -> Flow:
        parts = cut(inputs, batch.rows, batch.microbatches)
        for part in parts[:1] if is_even else (parts[0], parts[-1]):
            self.prepare(part)
        return Flow(
            self._stages,
            self._num_stages,
            self._wire,
            batch,
            inputs=parts if 0 in self._stages else [],
            finish=finish,
            is_even=is_even,
        )

    def _flow_forward(self, inputs: tuple[Tensor, ...], batch: Batch, finish: Finish) -> None:
        order = forward_order(sorted(self._stages), batch.microbatches)
        is_even = batch.rows % batch.microbatches == 0
        self._flow(inputs, batch, finish, is_even).run(order)

    def _outputs_of(self, inputs: tuple[Tensor, ...], batch: Batch) -> list[tuple[Tensor, ...]]:
        made: list[tuple[Tensor, ...]] = []
        self._flow_forward(inputs, batch, lambda _, outputs: made.append(outputs))
        return made

    def _into(self, losses: list[Tensor], targets: Sequence[Any]) -> Finish:
        """Make what computes the loss of a microbatch on the last stage."""

        def finish(microbatch: int, outputs: tuple[Tensor, ...]) -> Tensor:
            output = self._unflatten(outputs)
            loss = output if self._loss is None else self._loss(output, targets[microbatch])
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shown = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                whose = "the model's output" if self._loss is None else "the loss function's result"
                raise UsageError(f"pipeline: {whose} is {shown}; it must be a tensor of one number")
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise UsageError(
                    "pipeline: the loss does not depend on any parameter that needs a gradient"
                )
            losses.append(loss.detach())
            return loss

        return finish

    # -- between the processes ----------------------------------------------------------------

    def _tell_loss(self, losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        told = torch.zeros(2, dtype=torch.float64)
        if self._has_last:
            told[0] = sum(n.double() * w for n, w in zip(losses, weights, strict=True))
            told[1] = DTYPES.index(losses[0].dtype)
        self._broadcast(told)
        return told[0].to(DTYPES[int(told[1])])

    def _tell_outputs(
        self, made: Sequence[tuple[Tensor, ...]], rows: int, count: int
    ) -> list[Tensor] | None:
        header, outputs = blank(), list[Tensor]()
        if self._has_last:
            sizes = sizes_of_parts(rows, count)
            fits = count == 1 or all(map(are_of_rows, made, sizes))
            outputs = join(made) if fits else []
            header = encode([Like.of(output) for output in outputs], 0 if fits else _WHOLE)
        self._broadcast(header)
        (word,), likes = decode(header, 1)
        if word == _WHOLE:
            return None
        if not self._has_last:
            outputs = [torch.empty(like.shape, dtype=like.dtype) for like in likes]
        outputs = [output.contiguous() for output in outputs]
        for output in outputs:
            if output.numel():
                self._broadcast(output)
        return outputs

    def _broadcast(self, tensor: Tensor) -> None:
        with self._wire.waiting:
            dist.broadcast(tensor, group_src=self._owners[self._last], group=self._group)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Draw random numbers of this process's own; let the others know of an error here."""
        ours = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        try:
            yield
        except BaseException as error:
            for stage in self._stages.values():
                stage.clear()
            if not isinstance(error, PeerError):  # which the others have too
                self._group._core.fail(
                    f"rank {self._rank} of the pipeline, stages {sorted(self._stages)}, failed:"
                    f" {type(error).__name__}: {error}"
                )
            raise
        finally:
            self.random_state = torch.get_rng_state()
            torch.set_rng_state(ours)


def _group_of(given: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(given, DeviceMesh):
        return given
    names = given.mesh_dim_names or ()
    return given.get_group("pp") if "pp" in names else given.get_group()
