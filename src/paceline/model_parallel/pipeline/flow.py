"""Flow: one batch on its way through the stages of a process.

Actions are done in the schedule's order. Each waits for what it needs from the neighbouring stage:
receives are begun a few actions ahead, so that data moves while something else is computed. What a
stage hands to one of the same process does not leave it. While a process would wait and gradients
of weights were put off, it computes those.
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
from paceline.model_parallel.pipeline.stage import Crossing, Stage
from paceline.model_parallel.pipeline.transfer import (
    Arrival,
    Batch,
    Like,
    Wire,
    blank,
    check_alike,
    check_batch,
    crossings,
    decode,
    encode,
)
from paceline.observe.telemetry.trace import tracer

_AHEAD = 2  # receives that are begun before their turn

Finish = Callable[[int, tuple[Tensor, ...]], Tensor | None]


class Flow:
    """Runs an order of actions once."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        wire: Wire,
        batch: Batch,
        *,
        inputs: Sequence[Sequence[Tensor]],
        finish: Finish,
        is_even: bool = True,
    ) -> None:
        """`inputs`: those of the model, by microbatch. `finish` is called with the last outputs of
        a microbatch, and returns what its graph ends in, if it has one. `is_even`: all microbatches
        have the same shapes."""
        self._stages, self._last, self._wire = stages, num_stages - 1, wire
        self._batch, self._inputs, self._finish, self._is_even = batch, inputs, finish, is_even
        self._weight: float  # of a microbatch's loss in the gradients
        # Of what a stage receives and hands on, once the first microbatch has shown it.
        self._arriving: dict[int, list[Like]] = {}
        self._leaving: dict[int, list[Like]] = {}
        self._has_grad: dict[int, list[bool]] = {}  # of what a stage handed on: comes one back?
        self._gave_grad: dict[int, list[bool]] = {}  # of what a stage received: does one go back?
        self._here: dict[tuple[bool, int, int], list[Crossing] | list[Tensor | None]] = {}
        self._arrivals: dict[Action, Arrival] = {}
        self._awaited: deque[Action] = deque()
        self._weights: deque[Action] = deque()  # gradients that are put off, in the order's turn

    def run(self, order: Sequence[Action], scale: float = 1.0) -> None:
        """Do everything; what it makes is in the parameters' gradients and went to `finish`."""
        self._weight = scale / self._batch.microbatches
        self._awaited.extend(action for action in order if self._comes_from_outside(action))
        self._weights.extend(action for action in order if action.kind == BACKWARD_WEIGHT)
        for action in order:
            if action.kind == FORWARD:
                self._forward(action)
            elif action.kind == BACKWARD_WEIGHT:
                if self._weights and self._weights[0] == action:  # else it is done already
                    self._do_weights()
            else:
                self._backward(action)
        self._wire.flush()

    # -- actions ------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        _, index, microbatch = action
        stage = self._stages[index]
        if index == 0:
            given = [Crossing(tensor, False) for tensor in self._inputs[microbatch]]
        elif self._wire.is_local(index - 1):
            given = self._here.pop((True, index, microbatch))  # type: ignore[assignment]
        else:
            given = self._receive(action)
        traced_s = tracer.start()
        outputs = stage.forward(microbatch, given)
        if index == self._last:
            end = self._finish(microbatch, outputs)
            if end is not None and torch.is_grad_enabled():
                stage.end_in(microbatch, end)
        elif self._wire.is_local(index + 1):
            # Not detach(): that the next graph begins here would count as a change of the output.
            crossing = [Crossing(o.data, o.requires_grad) for o in outputs]
            self._here[True, index + 1, microbatch] = crossing
        else:
            self._hand_on(index, microbatch, outputs)
        if traced_s:
            _record("F", index, microbatch, traced_s)

    def _backward(self, action: Action) -> None:
        kind, index, microbatch = action
        stage = self._stages[index]
        grads: list[Tensor | None]
        if index == self._last:
            grads = [torch.full_like(o, self._weight) for o in stage.outputs_of(microbatch)]
        elif self._wire.is_local(index + 1):
            grads = self._here.pop((False, index, microbatch))  # type: ignore[assignment]
        else:
            grads = self._receive_grads(action)
        compute = stage.backward if kind == BACKWARD else stage.backward_input
        traced_s = tracer.start()
        found = compute(microbatch, grads)
        if index > 0 and self._wire.is_local(index - 1):
            self._here[False, index - 1, microbatch] = found
        elif index > 0 and found:
            self._hand_back(index, microbatch, found)
        if traced_s:
            _record("B" if kind == BACKWARD else "I", index, microbatch, traced_s)

    def _do_weights(self) -> None:
        # Always the next in the order, so that sums do not depend on who was slow.
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

    def _hand_on(self, index: int, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        likes = self._leaving.get(index)
        if likes is None or not self._is_even:
            likes = self._leaving[index] = [Like.of(output) for output in outputs]
            header = encode(likes, self._batch.rows, self._batch.microbatches)
            self._wire.send_header(header, index, index + 1, microbatch)
        else:
            check_alike(likes, outputs, index)
        self._wire.send([o.detach() for o in outputs], index, index + 1, microbatch)

    def _receive(self, action: Action) -> list[Crossing]:
        _, index, microbatch = action
        if index not in self._arriving or not self._is_even:
            header = self._wire.receive_header(blank(), index - 1, index, microbatch)
            (rows, count), self._arriving[index] = decode(header, 2)
            check_batch(self._batch, Batch(rows, count), index)
        return crossings(self._arriving[index], self._take(action))

    # -- backward, between processes ----------------------------------------------------------

    def _hand_back(self, index: int, microbatch: int, grads: list[Tensor | None]) -> None:
        there = self._gave_grad.get(index)
        if there is None:
            there = self._gave_grad[index] = [grad is not None for grad in grads]
            self._wire.send_header(torch.tensor(there), index, index - 1, microbatch)
        likes = [like for like in self._arriving[index] if like.needs_grad]
        sent = []
        for like, grad, is_there in zip(likes, grads, there, strict=True):
            if is_there:
                sent.append(torch.zeros(like.shape, dtype=like.dtype) if grad is None else grad)
            elif grad is not None:
                raise UsageError(
                    f"stage {index}: a tensor ({like}) has a gradient in microbatch {microbatch}"
                    " and had none in the first of the batch; what depends on what cannot change"
                    " from microbatch to microbatch"
                )
        self._wire.send(sent, index, index - 1, microbatch)

    def _receive_grads(self, action: Action) -> list[Tensor | None]:
        _, index, microbatch = action
        if index not in self._has_grad:
            room = torch.zeros(sum(like.needs_grad for like in self._leaving[index])).bool()
            if len(room):
                self._wire.receive_header(room, index + 1, index, microbatch)
            self._has_grad[index] = room.tolist()
        found = iter(self._take(action))
        return [next(found) if is_there else None for is_there in self._has_grad[index]]

    # -- waiting ------------------------------------------------------------------------------

    def _comes_from_outside(self, action: Action) -> bool:
        if action.kind == FORWARD:
            return action.stage > 0 and not self._wire.is_local(action.stage - 1)
        if action.kind == BACKWARD_WEIGHT:
            return False
        return action.stage < self._last and not self._wire.is_local(action.stage + 1)

    def _take(self, action: Action) -> list[Tensor]:
        """Return what arrives for an action; begin to receive what the next ones need."""
        assert self._awaited[0] == action, (self._awaited[0], action)
        for coming in list(islice(self._awaited, 1 + _AHEAD if self._is_even else 1)):
            likes = self._likes_for(coming)
            if likes is None:  # its header comes first
                break
            if coming not in self._arrivals:
                _, index, microbatch = coming
                source = index - 1 if coming.kind == FORWARD else index + 1
                self._arrivals[coming] = self._wire.begin(likes, source, index, microbatch)
        self._awaited.popleft()
        arrival = self._arrivals.pop(action)
        while self._can_do_weights() and not arrival.is_there():
            self._do_weights()
        with self._wire.waiting:
            return arrival.wait()

    def _likes_for(self, action: Action) -> list[Like] | None:
        if action.kind == FORWARD:
            return self._arriving.get(action.stage)
        if action.stage not in self._has_grad:
            return None
        with_grad = [like for like in self._leaving[action.stage] if like.needs_grad]
        return list(compress(with_grad, self._has_grad[action.stage]))


def _record(kind: str, stage: int, microbatch: int, traced_s: float) -> None:
    """Show an action in the trace, as schedules are drawn: F0, B0, I0, W0."""
    tracer.add(f"{kind}{microbatch}", traced_s, stage=stage, microbatch=microbatch)
