"""ScheduleRunner: runs the actions of one batch on the stages of a process.

Actions run in the schedule's order. Each waits for its inputs from the neighbouring stage: receives
start a few actions ahead, so that data moves during other computations. Tensors between two stages
of the same process stay in it. While a process would wait, it computes gradients of weights that
were postponed. On a device the host never waits for tensors, so there the order is the schedule's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, islice

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
)
from paceline.model_parallel.pipeline.stage import PipelineStage, StageTensor
from paceline.model_parallel.pipeline.transfer import (
    BatchShape,
    PendingReceive,
    StageTransport,
    TensorMeta,
    blank,
    check_batch,
    check_metas,
    decode,
    encode,
    stage_tensors,
)
from paceline.observe.telemetry.trace import tracer

_AHEAD = 2  # receives that start before their turn

Finish = Callable[[int, tuple[Tensor, ...]], Tensor | None]


class ScheduleRunner:
    """Runs an order of actions once."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        num_stages: int,
        transport: StageTransport,
        batch: BatchShape,
        *,
        inputs: Sequence[Sequence[Tensor]],
        finish: Finish,
        is_even: bool = True,
    ) -> None:
        """`inputs`: the model's, by microbatch. `finish` is called with the model's outputs of a
        microbatch, and returns what its graph ends in, if it has one. `is_even`: all microbatches
        have the same shapes."""
        self._stages, self._last, self._transport = stages, num_stages - 1, transport
        self._batch, self._inputs, self._finish, self._is_even = batch, inputs, finish, is_even
        self._weight: float  # of a microbatch's loss in the gradients
        # Of what a stage receives and sends, known after the first microbatch.
        self._arriving: dict[int, list[TensorMeta]] = {}
        self._leaving: dict[int, list[TensorMeta]] = {}
        self._has_grad: dict[int, list[bool]] = {}  # of the outputs: does a gradient come back?
        self._gave_grad: dict[int, list[bool]] = {}  # of the inputs: is a gradient sent back?
        self._local_tensors: dict[
            tuple[bool, int, int], list[StageTensor] | list[Tensor | None]
        ] = {}
        self._arrivals: dict[Action, PendingReceive] = {}
        self._awaited: deque[Action] = deque()
        self._weights: deque[Action] = deque()  # gradients that are postponed, in order

    def run(self, order: Sequence[Action], scale: float = 1.0) -> None:
        """Run all actions; results are in the parameters' gradients and were passed to `finish`."""
        self._weight = scale / self._batch.microbatches
        self._awaited.extend(action for action in order if self._is_remote(action))
        self._weights.extend(action for action in order if action.kind == BACKWARD_WEIGHT)
        for action in order:
            if action.kind == FORWARD:
                self._forward(action)
            elif action.kind == BACKWARD_WEIGHT:
                if self._weights and self._weights[0] == action:  # else it was done while waiting
                    self._do_weights()
            else:
                self._backward(action)
        self._transport.flush()

    # -- actions ------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        _, index, microbatch = action
        stage = self._stages[index]
        if index == 0:
            given = [StageTensor(tensor, False) for tensor in self._inputs[microbatch]]
        elif self._transport.is_local(index - 1):
            given = self._local_tensors.pop((True, index, microbatch))  # type: ignore[assignment]
        else:
            given = self._receive(action)
        traced_s = tracer.start()
        outputs = stage.forward(microbatch, given)
        if index == self._last:
            end = self._finish(microbatch, outputs)
            if end is not None and torch.is_grad_enabled():
                stage.end_in(microbatch, end)
        elif self._transport.is_local(index + 1):
            # Not detach(): the next graph's start here would count as a change of the output.
            crossing = [StageTensor(o.data, o.requires_grad) for o in outputs]
            self._local_tensors[True, index + 1, microbatch] = crossing
        else:
            self._send_outputs(index, microbatch, outputs)
        if traced_s:
            _record("F", index, microbatch, traced_s)

    def _backward(self, action: Action) -> None:
        kind, index, microbatch = action
        stage = self._stages[index]
        grads: list[Tensor | None]
        if index == self._last:
            grads = [torch.full_like(o, self._weight) for o in stage.outputs_of(microbatch)]
        elif self._transport.is_local(index + 1):
            grads = self._local_tensors.pop((False, index, microbatch))  # type: ignore[assignment]
        else:
            grads = self._receive_gradients(action)
        compute = stage.backward if kind == BACKWARD else stage.backward_input
        traced_s = tracer.start()
        found = compute(microbatch, grads)
        if index > 0 and self._transport.is_local(index - 1):
            self._local_tensors[False, index - 1, microbatch] = found
        elif index > 0 and found:
            self._send_gradients(index, microbatch, found)
        if traced_s:
            _record("B" if kind == BACKWARD else "I", index, microbatch, traced_s)

    def _do_weights(self) -> None:
        # Always the next in the order, so that sums do not depend on which stage was slow.
        action, traced_s = self._weights.popleft(), tracer.start()
        self._stages[action.stage].backward_weight(action.microbatch)
        if traced_s:
            _record("W", action.stage, action.microbatch, traced_s)

    def _can_do_weights(self) -> bool:
        if not self._weights:
            return False
        action = self._weights[0]
        return self._stages[action.stage].has_weights_left(action.microbatch)

    # -- forward, between processes -----------------------------------------------------------

    def _send_outputs(self, index: int, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        metas = self._leaving.get(index)
        if metas is None or not self._is_even:
            metas = self._leaving[index] = [TensorMeta.of(output) for output in outputs]
            header = encode(metas, self._batch.rows, self._batch.microbatches)
            self._transport.send_header(header, index, index + 1, microbatch)
        else:
            check_metas(metas, outputs, index)
        self._transport.send([o.detach() for o in outputs], index, index + 1, microbatch)

    def _receive(self, action: Action) -> list[StageTensor]:
        _, index, microbatch = action
        if index not in self._arriving or not self._is_even:
            header = self._transport.receive_header(blank(), index - 1, index, microbatch)
            (rows, count), self._arriving[index] = decode(header, 2)
            check_batch(self._batch, BatchShape(rows, count), index)
        return stage_tensors(self._arriving[index], self._take(action))

    # -- backward, between processes ----------------------------------------------------------

    def _send_gradients(self, index: int, microbatch: int, grads: list[Tensor | None]) -> None:
        there = self._gave_grad.get(index)
        if there is None:
            there = self._gave_grad[index] = [grad is not None for grad in grads]
            self._transport.send_header(torch.tensor(there), index, index - 1, microbatch)
        metas = [meta for meta in self._arriving[index] if meta.needs_grad]
        sent = []
        for meta, grad, is_there in zip(metas, grads, there, strict=True):
            if is_there:
                sent.append(self._transport.empty(meta).zero_() if grad is None else grad)
            elif grad is not None:
                raise UsageError(
                    f"stage {index}: a tensor ({meta}) has a gradient in microbatch {microbatch}"
                    " and had none in the first of the batch; what depends on what must not change"
                    " from microbatch to microbatch"
                )
        self._transport.send(sent, index, index - 1, microbatch)

    def _receive_gradients(self, action: Action) -> list[Tensor | None]:
        _, index, microbatch = action
        if index not in self._has_grad:
            room = torch.zeros(sum(meta.needs_grad for meta in self._leaving[index])).bool()
            if len(room):
                self._transport.receive_header(room, index + 1, index, microbatch)
            self._has_grad[index] = room.tolist()
        found = iter(self._take(action))
        return [next(found) if is_there else None for is_there in self._has_grad[index]]

    # -- waiting ------------------------------------------------------------------------------

    def _is_remote(self, action: Action) -> bool:
        if action.kind == FORWARD:
            return action.stage > 0 and not self._transport.is_local(action.stage - 1)
        if action.kind == BACKWARD_WEIGHT:
            return False
        return action.stage < self._last and not self._transport.is_local(action.stage + 1)

    def _take(self, action: Action) -> list[Tensor]:
        """Return what is received for an action; start to receive what the next ones need."""
        assert self._awaited[0] == action, (self._awaited[0], action)
        for coming in list(islice(self._awaited, 1 + _AHEAD if self._is_even else 1)):
            metas = self._metas_for(coming)
            if metas is None:  # its header is received first
                break
            if coming not in self._arrivals:
                _, index, microbatch = coming
                source = index - 1 if coming.kind == FORWARD else index + 1
                self._arrivals[coming] = self._transport.begin(metas, source, index, microbatch)
        self._awaited.popleft()
        arrival = self._arrivals.pop(action)
        if self._transport.can_look_ahead():
            while self._can_do_weights() and not arrival.is_there():
                self._do_weights()
        with self._transport.waiting:
            return arrival.wait()

    def _metas_for(self, action: Action) -> list[TensorMeta] | None:
        if action.kind == FORWARD:
            return self._arriving.get(action.stage)
        if action.stage not in self._has_grad:
            return None
        with_grad = [meta for meta in self._leaving[action.stage] if meta.needs_grad]
        return list(compress(with_grad, self._has_grad[action.stage]))


def _record(kind: str, stage: int, microbatch: int, traced_s: float) -> None:
    """Add an action to the trace, as schedules are drawn: F0, B0, I0, W0."""
    tracer.add(f"{kind}{microbatch}", traced_s, stage=stage, microbatch=microbatch)
