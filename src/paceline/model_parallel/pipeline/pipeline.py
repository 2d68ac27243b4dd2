"""Pipeline: trains and evaluates a model whose stages are in several processes.

    rank 0:  F0 F1    B0 F2 B1 ...         all processes get the same batch; the first stage uses
    rank 1:     F0 B0 F1 B1 ...            the inputs, the last one the targets

A batch is split into microbatches, so that stages work at the same time; gradients are those of the
mean loss over the batch. Two things differ from one process, as in any pipeline: BatchNorm takes
its statistics from microbatches, and dropout masks are different.

Some schedules come from torch.distributed.pipelining (schedules.py), the runner is our own: torch's
stages send Python objects (pickles) to agree on shapes, do that only once, and refuse stages that
change their inputs in place or return views.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.comm.devices import CPU, is_on_device, random_state_of, set_random_state_of
from paceline.errors import PeerError, UsageError
from paceline.model_parallel.pipeline.microbatches import (
    count_microbatches,
    count_rows,
    have_rows,
    join_outputs,
    microbatch_sizes,
    split_batch,
)
from paceline.model_parallel.pipeline.schedule_runner import Finish, ScheduleRunner
from paceline.model_parallel.pipeline.schedules import (
    forward_order,
    schedule_actions,
    stage_ranks,
    stages_of_rank,
)
from paceline.model_parallel.pipeline.stage import PipelineStage
from paceline.model_parallel.pipeline.stage_links import FormLink, StageLinks
from paceline.model_parallel.pipeline.tied_parameters import TiedParameters
from paceline.model_parallel.pipeline.transfer import (
    DTYPES,
    BatchShape,
    StageTransport,
    TensorMeta,
    blank,
    decode,
    encode,
)
from paceline.observe.telemetry.trace import Stopwatch

_UNSPLIT = -1  # in a header: outputs have no rows, so evaluate the batch as one


class Pipeline:
    """The stages that this process holds, connected with those of the other processes.

    `stages` and their `indices` are those that the schedule gives to this rank of the group (the pp
    axis): `stages_of_rank`. All processes construct it together, and make the same calls with the
    same batches. `loss(output, target)` returns the mean over its arguments; without a loss the
    model's own output is the loss. `shared` names parameters that several stages use. `form_link`
    and `on_device` (the group of the axis there): for a model on a device; `group` is then for what
    is on the CPU.
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
        on_device: tuple[DeviceMesh, FormLink] | None = None,
    ) -> None:
        self._group: Any = _group_of(group)
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._schedule, self._loss, self._asked = schedule, loss, microbatches
        self._owners = stage_ranks(schedule, self._num_ranks)
        self._check(stages, indices, num_stages)
        self._num_stages, self._last = num_stages, num_stages - 1
        self._stages = {i: PipelineStage(s, i) for i, s in zip(indices, stages, strict=True)}
        self._has_last = self._last in self._stages
        self._unflatten: Callable[[Any], Any] = stages[-1].unflatten  # type: ignore[assignment]
        self._links: StageLinks | None = None
        if on_device is not None:
            axis, form = on_device
            place = (torch.device(axis.device_type), _group_of(axis), self._rank, self._owners)
            self._links = StageLinks(*place, shared, form)
        self._transport = StageTransport(self._group, self._owners, self._links)
        modules = dict(zip(indices, stages, strict=True))
        self._shared = TiedParameters(modules, self._owners, self._group, shared, self._links)
        self.modules = tuple(stages)
        self.prepare: Callable[[tuple[Any, ...]], None] = lambda _: (
            None
        )  # called with the inputs before a pass
        self._is_of_rows = True  # the model's output has a row for each row of a batch
        # Processes have the same seed, but stages must not drop the same elements. The generator of
        # the process itself does not change: samplers use it, and must draw the same numbers.
        seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (indices[0] + 1)) % (1 << 63)
        # Of the CPU and of the device, by name in checkpoints, which save and restore them.
        self._generators = {"stage/random": CPU}
        if self._links is not None:
            self._generators[f"stage/random/{self._links.device.type}"] = self._links.device
        self.random_states = {
            name: torch.Generator(device).manual_seed(seed).get_state()
            for name, device in self._generators.items()
        }

    def _check(self, stages: Sequence[nn.Module], indices: Sequence[int], num_stages: int) -> None:
        expected = stages_of_rank(self._schedule, self._rank, self._num_ranks)
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
        """Add the time for which this process waits for other stages to this stopwatch."""
        self._transport.waiting = waiting

    # -- training -----------------------------------------------------------------------------

    def forward_backward(
        self, inputs: tuple[Tensor, ...], targets: Any = None, scale: float = 1.0
    ) -> Tensor:
        """Add the gradients of a batch's mean loss to the parameters'; return the loss.

        Every process of the pipeline returns the same loss, detached. Gradients are multiplied by
        `scale`, the loss is not. Blocks until the gradients of the local stages are complete.
        """
        rows = count_rows(inputs, targets)
        count = count_microbatches(rows, self._asked, self._schedule, self._num_ranks)
        order = schedule_actions(self._schedule, self._rank, self._num_ranks, count)
        losses: list[Tensor] = []
        with self._collective_call(), torch.enable_grad():
            self._shared.begin_batch()
            finish = self._loss_into(losses, split_batch(targets, rows, count))
            self._runner(inputs, BatchShape(rows, count), finish).run(order, scale)
            self._shared.sum_gradients(self._transport.waiting)
            return self._broadcast_loss(losses)

    # -- evaluating ---------------------------------------------------------------------------

    def evaluate(self, inputs: tuple[Tensor, ...]) -> Any:
        """Return the full model's output, in its own structure, on every process.

        Without gradients, for a batch of any size.
        """
        rows = count_rows(inputs)
        with self._collective_call(), torch.no_grad():
            while True:
                count = self._num_parts(rows) if self._is_of_rows else 1
                made = self._outputs_of(inputs, BatchShape(rows, count))
                outputs = self._broadcast_outputs(made, rows, count)
                if outputs is not None:
                    return self._unflatten(outputs)
                # Outputs without rows cannot be joined; evaluate the batch as one.
                self._is_of_rows = False

    def _num_parts(self, rows: int) -> int:
        most = 4 * self._num_ranks if self._asked == "auto" else int(self._asked)
        return min(rows, most)

    # -- through the stages -------------------------------------------------------------------

    def _runner(
        self, inputs: tuple[Tensor, ...], batch: BatchShape, finish: Finish, is_even: bool = True
    ) -> ScheduleRunner:
        parts = split_batch(inputs, batch.rows, batch.microbatches)
        for part in parts[:1] if is_even else (parts[0], parts[-1]):
            self.prepare(part)
        return ScheduleRunner(
            self._stages,
            self._num_stages,
            self._transport,
            batch,
            inputs=parts if 0 in self._stages else [],
            finish=finish,
            is_even=is_even,
        )

    def _run_forward(self, inputs: tuple[Tensor, ...], batch: BatchShape, finish: Finish) -> None:
        order = forward_order(sorted(self._stages), batch.microbatches)
        is_even = batch.rows % batch.microbatches == 0
        self._runner(inputs, batch, finish, is_even).run(order)

    def _outputs_of(
        self, inputs: tuple[Tensor, ...], batch: BatchShape
    ) -> list[tuple[Tensor, ...]]:
        made: list[tuple[Tensor, ...]] = []
        self._run_forward(inputs, batch, lambda _, outputs: made.append(outputs))
        return made

    def _loss_into(self, losses: list[Tensor], targets: Sequence[Any]) -> Finish:
        """Return the function that computes the loss of a microbatch on the last stage."""

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

    def _broadcast_loss(self, losses: Sequence[Tensor]) -> Tensor:
        if self._links is not None:
            return self._broadcast_loss_on_device(losses, self._links.device)
        sent = torch.zeros(2, dtype=torch.float64)
        if self._has_last:
            sent[0] = sum(one.double() * (1 / len(losses)) for one in losses)
            sent[1] = DTYPES.index(losses[0].dtype)
        self._broadcast(sent)
        return sent[0].to(DTYPES[int(sent[1])])

    def _broadcast_loss_on_device(self, losses: Sequence[Tensor], device: torch.device) -> Tensor:
        # The dtype is known on the host: to read it from the device would wait for it.
        dtype, sent = torch.zeros(1, dtype=torch.int64), torch.zeros((), device=device)
        if self._has_last:
            dtype[0] = DTYPES.index(losses[0].dtype)
            sent = sum((one.double() * (1 / len(losses)) for one in losses), sent.double())
        self._broadcast(dtype)
        sent = sent.to(DTYPES[int(dtype)])
        self._broadcast(sent)
        return sent

    def _broadcast_outputs(
        self, made: Sequence[tuple[Tensor, ...]], rows: int, count: int
    ) -> list[Tensor] | None:
        header, outputs = blank(), list[Tensor]()
        if self._has_last:
            sizes = microbatch_sizes(rows, count)
            fits = count == 1 or all(map(have_rows, made, sizes))
            outputs = join_outputs(made) if fits else []
            header = encode([TensorMeta.of(output) for output in outputs], 0 if fits else _UNSPLIT)
        self._broadcast(header)
        (mark,), metas = decode(header, 1)
        if mark == _UNSPLIT:
            return None
        if not self._has_last:
            outputs = [self._transport.empty(meta) for meta in metas]
        outputs = [output.contiguous() for output in outputs]
        for output in outputs:
            if output.numel():
                self._broadcast(output)
        return outputs

    def _broadcast(self, tensor: Tensor) -> None:
        group = self._group
        if self._links is not None and is_on_device(tensor):
            group = self._links.group
        with self._transport.waiting:
            dist.broadcast(tensor, group_src=self._owners[self._last], group=group)

    @contextlib.contextmanager
    def _collective_call(self) -> Iterator[None]:
        """Use this process's own random numbers; report an error here to the other processes."""
        ours = self._swap_random_states(self.random_states)
        try:
            yield
        except BaseException as error:
            for stage in self._stages.values():
                stage.clear()
            if not isinstance(error, PeerError):  # the other processes have it too
                self._group._core.fail(
                    f"rank {self._rank} of the pipeline, stages {sorted(self._stages)}, failed:"
                    f" {type(error).__name__}: {error}"
                )
            raise
        finally:
            self.random_states = self._swap_random_states(ours)

    def _swap_random_states(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set the states of the generators; return what they were."""
        before = {name: random_state_of(device) for name, device in self._generators.items()}
        for name, device in self._generators.items():
            set_random_state_of(device, states[name])
        return before


def _group_of(given: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(given, DeviceMesh):
        return given
    names = given.mesh_dim_names or ()
    return given.get_group("pp") if "pp" in names else given.get_group()
