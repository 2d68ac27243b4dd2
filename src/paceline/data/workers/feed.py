"""One pass of a trainer over the batches that data workers make for it.

A bounded number of orders is under way (`lookahead` and the one that is needed next); each batch
that is handed out makes room for one more, so data workers are never further ahead than that. What
comes is handed out in the order of the epoch, whoever was faster.

The tensors of a batch lie in memory of the data worker, which it does not touch until the last of
them is gone here. A script that keeps many batches gets copies, so that this memory stays bounded.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from paceline.data.cursor.passes import Pass
from paceline.data.randomness import kept_random_state
from paceline.data.split.order import portable
from paceline.data.workers import messages as m
from paceline.data.workers.messages import unpack
from paceline.data.workers.recipe import Ended, Failure, Recipe
from paceline.data.workers.supply import Answer, Pending, Supply
from paceline.errors import DataError, UsageError
from paceline.runtime.console import say
from paceline.runtime.job import current

_HELD = 4  # batches of one data worker that the script may hold, besides those ahead


@dataclass
class Numbered:
    """A loader by its number, and how its batches are made."""

    number: int
    recipe: Recipe
    unknown: set[int]  # numbers that data workers do not know

    @property
    def is_unknown(self) -> bool:
        return self.number in self.unknown


class Feed:
    """Orders and hands out the batches of one pass."""

    reseeds = True

    def __init__(
        self,
        numbered: Numbered,
        supply: Supply | None,
        this: Pass,
        lookahead: int,
        *,
        pin_memory: bool,
    ) -> None:
        self._numbered, self._recipe = numbered, numbered.recipe
        self._supply, self._epoch = supply, this.epoch
        self._pins = pin_memory and torch.cuda.is_available()
        self._lookahead, self._held = lookahead, lookahead + _HELD

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:  # noqa: ARG002
        """Return an iterator over the batches of these parts, each with a seed of its own."""
        return self._made(self._order(seed, indices=portable(part)) for seed, part in parts)

    def run_stream(self, seed: int, share: tuple[int, int, int]) -> Iterator[Any]:
        """Yield the batches of a pass over a stream, with the number of samples in each."""
        places = itertools.count()
        orders = (self._order(seed, stream=share, place=place) for place in places)
        try:
            yield from self._made(orders)
        except Ended:
            return

    def _made(self, orders: Iterator[m.Order]) -> Iterator[Any]:
        under_way = deque[Pending | m.Order]()
        try:
            while True:
                # All ranks are equally far ahead: they prepare the order of samples together.
                for order in itertools.islice(orders, self._lookahead + 1 - len(under_way)):
                    under_way.append(self._asked(order))
                if not under_way:
                    return
                batch = self._received(under_way.popleft())
                yield pin_memory(batch) if self._pins else batch
        finally:
            for left in under_way:
                if isinstance(left, Pending) and self._supply is not None:
                    self._supply.give_up(left)

    def _order(self, seed: int, **what: Any) -> m.Order:
        number, facts = self._numbered.number, self._recipe.facts
        return m.Order(0, number, facts, self._epoch, seed, **what)

    def _asked(self, order: m.Order) -> Pending | m.Order:
        if self._supply is None or self._supply.is_empty or self._numbered.is_unknown:
            return order
        return self._supply.ask(order)

    def _received(self, ordered: Pending | m.Order) -> Any:
        """Wait for a batch, or make it."""
        if not isinstance(ordered, Pending):
            return self._made_here(ordered)
        assert self._supply is not None, "somebody was asked"
        answer = self._supply.wait(ordered)
        if answer is None or self._is_unknown(answer):
            return self._made_here(ordered.order)
        return self._opened(answer)

    def _made_here(self, order: m.Order) -> Any:
        try:
            with kept_random_state():
                return self._recipe.make(order)
        except Failure as failure:
            raise DataError(f"rank {current().env.rank}: {failure}") from failure.__cause__

    def _opened(self, answer: Answer) -> Any:
        reply, line, memory = answer.reply, answer.line, answer.memory
        if reply.problem == m.RAISED:
            raise DataError(f"rank {current().env.rank}: {reply.text}")
        if reply.problem == m.ENDED:
            raise Ended
        if reply.problem:
            raise UsageError(
                f"mode='pipeline': loader {self._numbered.number} of this script is"
                f" {self._recipe.facts} on rank {current().env.rank}, but {reply.text} on data"
                f" worker {line.member.number}; call pl.shard for the same loaders in the same"
                " order in every process"
            )
        if memory is not None and line.held > self._held:
            memory = memory.clone()
        return unpack(reply.plain, memory)

    def _is_unknown(self, answer: Answer) -> bool:
        if answer.reply.problem != m.UNKNOWN:
            return False
        if not self._numbered.is_unknown:
            self._numbered.unknown.add(self._numbered.number)
            say(
                f"rank {current().env.rank}: the data workers do not know loader"
                f" {self._numbered.number} ({self._recipe.facts}): its batches are MADE HERE; call"
                " pl.shard for all loaders before the first loop over one of them"
            )
        return True
