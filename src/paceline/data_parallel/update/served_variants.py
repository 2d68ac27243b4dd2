"""Two variants of the served update: wait=layer, and push=delta or push=params.

wait=layer: a step does not wait for fresh parameters; each layer does, when it needs them.
`optimizer.step()` commits the buckets one by one, the first layers' first, and returns. The next
forward pass can begin as soon as the first layers' values have arrived, while the servers still
work on the others. Every module that has parameters of its own waits for them before it runs. The
rest is waited for at the end of the forward pass, when a state_dict is made, and before the next
step. A script that touches parameters itself between two steps would see old values, or half of new
ones, unless it calls `model.pull()` first; that is why this is an option.

push=delta, push=params: the script's own optimizer runs on the worker. The servers get the
difference that it made, or its result. What the script itself does to parameters between two steps
is sent in the same way.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.data_parallel.bucket import Bucket
from paceline.data_parallel.hooks import UncopiedHook, nothing
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
        self._stops = False  # whether a reply to the last step, of those received, says so

    def add(self, buckets: Sequence[Bucket]) -> None:
        super().add(buckets)
        self._bucket_of.update((slot.param, bucket) for bucket in buckets for slot in bucket.slots)

    def hook_modules(self, model: nn.Module) -> None:
        """Let the modules wait for their parameters, also those that are thawed later."""
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hook = UncopiedHook(self._before_module, nothing)
                self._hooks.append(module.register_forward_pre_hook(hook))
        settle = UncopiedHook(lambda *_: self.settle(), nothing)
        self._hooks.append(model.register_state_dict_pre_hook(settle))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def run(self, step: Step) -> Any:
        self.settle()  # so that all workers have received all replies to the last step
        self.is_stop_agreed, self._stops = self._stops, False
        return super().run(step)

    def pull(self) -> None:
        self.settle()
        super().pull()

    def settle(self) -> None:
        """Wait for all parameters that have not arrived yet."""
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
        self._show_fresh_values([bucket])
        self._note_staleness(replies)
        self._warn_of_notices(replies)
        self._stops = self._stops or any(reply.stops for reply in replies)


class LocalOptimizer(ServedUpdate):
    """Runs the script's optimizer here; the servers get what it changed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self._rule.push == "params" and self._number == 0:
            warnings.warn(
                "push=params: the last worker to write wins, and what others did since it read is"
                " lost (the report counts it as overwritten); push=delta or push=grad keep it",
                stacklevel=2,
            )

    def add(self, buckets: Sequence[Bucket]) -> None:
        super().add(buckets)
        self._remember(buckets)

    def begin_with_values(self, buckets: Sequence[Bucket]) -> None:
        super().begin_with_values(buckets)
        self._remember(buckets)

    def _finish(self, wait: Any) -> list[m.Reply]:
        replies = super()._finish(wait)
        if self._rule.push == "delta":
            self._remember(self._buckets)
        return replies

    def _remember(self, buckets: Sequence[Bucket]) -> None:
        """Keep the values from which the next difference is computed."""
        for bucket in buckets:
            self._exchange.outbox(bucket).copy_(bucket.params)

    def run(self, step: Step) -> Any:
        result = step()
        for bucket in self._buckets:
            outbox = self._exchange.outbox(bucket)
            if self._rule.push == "delta":
                torch.sub(bucket.params, outbox, out=outbox)
            else:
                outbox.copy_(bucket.params)
            self._wait([self._exchange.push(bucket, [])])
        self.committed_at = self.position()
        self._note_staleness(self._finish(self._exchange.commit(None).wait))
        return result
