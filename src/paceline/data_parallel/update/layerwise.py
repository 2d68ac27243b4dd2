"""wait=layer: a step does not wait for fresh parameters; each layer does, when it needs them.

`optimizer.step()` commits the buckets one by one, the first layers' first, and returns. The next
forward pass can begin as soon as the first layers' values are there, while the servers still work
on the others. Every module that has parameters of its own waits for them before it runs, and
whatever is left is waited for when the forward pass ends, when a state_dict is made, and before
the next step.

A script that touches parameters itself between two steps would see old values, or half of new
ones, unless it calls `model.pull()` first; that is why this has to be asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.data_parallel.bucket import Bucket
from paceline.data_parallel.hooks import Detached, nothing
from paceline.data_parallel.update.served import ServedUpdate
from paceline.data_parallel.update.step import Step
from paceline.observe.telemetry.trace import tracer
from paceline.ps import messages as m
from paceline.ps.client.remote_table import RemoteTable
from paceline.runtime.work import Work


class LayerwiseUpdate(ServedUpdate):
    """Commits steps to the servers, and lets each layer wait for its own parameters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._arriving: dict[RemoteTable, Work[list[m.Reply]]] = {}
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._hooks: list[RemovableHandle] = []
        self._stops = False  # so say the replies to the last step that are there

    def add(self, buckets: Sequence[Bucket]) -> None:
        super().add(buckets)
        self._bucket_of.update((slot.param, bucket) for bucket in buckets for slot in bucket.slots)

    def watch(self, model: nn.Module) -> None:
        """Let the modules of this model wait for their parameters, also ones that join later."""
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hook = Detached(self._before_module, nothing)
                self._hooks.append(module.register_forward_pre_hook(hook))
        settle = Detached(lambda *_: self.settle(), nothing)
        self._hooks.append(model.register_state_dict_pre_hook(settle))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def run(self, step: Step) -> Any:
        self.settle()  # so that all workers have heard what the last step's replies say
        self.is_stop_agreed, self._stops = self._stops, False
        return super().run(step)

    def pull(self) -> None:
        self.settle()
        super().pull()

    def settle(self) -> None:
        """Wait for all parameters that are still on their way."""
        for bucket in reversed(self._buckets):
            self._settle_one(bucket)

    def _end_step(self) -> None:
        commits = self._exchange.commit_each(self._settings(), stops=self.wants_stop())
        self._arriving = dict(commits)

    def _before_module(self, module: nn.Module, _: Any) -> None:
        for param in module.parameters(recurse=False) if self._arriving else ():
            if param in self._bucket_of:
                self._settle_one(self._bucket_of[param])

    def _settle_one(self, bucket: Bucket) -> None:
        work = self._arriving.pop(self._exchange.table_of(bucket), None)
        if work is None:
            return
        start, traced_s = time.perf_counter(), tracer.start()
        replies = work.wait()
        self.waited_s += time.perf_counter() - start
        if traced_s:
            tracer.add("pull", traced_s, bucket=bucket.index)
        self._take_over([bucket])
        self._note_staleness(replies)
        self._tell_notices(replies)
        self._stops = self._stops or any(reply.stops for reply in replies)
