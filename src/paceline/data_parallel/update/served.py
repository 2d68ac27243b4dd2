"""optimizer.step() when parameter servers run the optimizer.

The step ends with a COMMIT: what was pushed during backward counts, with the learning rates that
the optimizer object has now; the servers update, and fresh parameters come back. Before that, this
worker looks whether the script has changed anything the servers do not know of:

    gradients    clipped, unscaled, set to None: the servers get the changed ones
    parameters   loaded, clamped: the servers take them over

In lockstep all workers have done the same to the same averages, and the first one that is left
speaks for all.
Free-running, each speaks for itself; parameters that one changes replace what others have achieved
meanwhile, so that is said once.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from paceline.comm.shared_memory import HostTensor
from paceline.data_parallel.bucket import Bucket, Slot
from paceline.data_parallel.update.step import Step
from paceline.errors import NonFiniteGradient, UsageError
from paceline.observe.telemetry.trace import tracer
from paceline.pace.server import ServerExchange
from paceline.ps import messages as m
from paceline.ps.spec import Rule
from paceline.runtime.work import Work


class ServedUpdate:
    """Commits steps to the servers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: ServerExchange,
        number: int,
        rule: Rule,
        num_servers: int,
    ) -> None:
        self.name = f"on {num_servers} server{'s' if num_servers > 1 else ''}"
        self._optimizer = weakref.ref(optimizer)
        self._exchange = exchange
        self._rule = rule
        self._number = number  # this worker's
        self._buckets: list[Bucket] = []
        self._told: list[dict[str, Any]] | None = None
        self._grad_versions: dict[Slot, tuple[bool, int]] = {}  # had a gradient, its version
        self._param_versions: dict[Slot, int] = {}
        self._has_warned = self._has_turn = False
        self._is_pushed = False  # gradients were exchanged since the last step
        self._seen: dict[Bucket, int] = {}  # versions of the averages when they were last clean
        self._covered: set[Bucket] = set()  # whose averages the script wrote to before a step
        self._edited: list[HostTensor] = []  # parameters that it wrote to since the last step
        self.waited_s = 0.0
        self.staleness: int | None = None  # versions by others that the last update had not seen
        # Where all workers last met, and the same when this one last committed (server_tables.py).
        self.position: Callable[[], int] = lambda: 0
        self.committed_at = -1
        # In lockstep: whether this worker was asked to stop; elsewhere each stops by itself.
        self.wants_stop: Callable[[], bool] = lambda: False
        self.is_stop_agreed = False  # some worker was, and all know it behind the same step

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Update these from now on."""
        self._buckets += buckets
        self._remember_params(buckets)

    def remember_gradients(self) -> None:
        """Note how the exchange has left the gradients; called at the end of backward."""
        self._uncover_averages()
        self._is_pushed = True
        for slot in self._slots():
            self._grad_versions[slot] = (slot.param.grad is not None, slot.averaged._version)

    def heed_verdict(self) -> None:
        """Raise, or leave the step out, when gradients are not finite; alike on all workers."""
        verdict = self._exchange.verdict
        if not verdict:
            return
        if self._rule.nonfinite == "raise":
            raise NonFiniteGradient(f"{verdict}; the step is not applied on any server")
        for slot in self._slots():
            slot.param.grad = None
        if self._speaks:
            warnings.warn(f"{verdict}; the step is left out on all ranks", stacklevel=2)

    def run(self, step: Step) -> Any:
        if self._exchange.verdict:  # nobody commits: the next pushes take the place of these
            return self._run_hooks_of(step)
        self._adopt_parameters()
        if self._is_pushed and not self._exchange.pushes_late:
            self._adopt_gradients()
        else:
            self._push_again()
        result = self._run_hooks_of(step)
        self.committed_at = self.position()
        self._end_step()
        self._is_pushed = self._has_turn = False
        self._seen = {bucket: bucket.averaged._version for bucket in self._buckets}
        return result

    def _end_step(self) -> None:
        traced_s = tracer.start()
        ended = self._exchange.commit(self._settings(), stops=self.wants_stop())
        replies = self._finish(ended.wait)
        self._note_staleness(replies)
        self.is_stop_agreed = any(reply.stops for reply in replies)
        if traced_s:
            tracer.add("commit", traced_s)

    def settle(self) -> None:
        """Wait for parameters that are still on their way; here there are none."""

    def close(self) -> None:
        """Let go of the model."""

    def before_forward(self) -> None:
        """Take a turn, if the pace has turns, for the step that begins here."""
        if self._rule.unit == "version" and not self._has_turn:
            self._has_turn = True
            self._adopt_parameters()
            self._pull(in_turn=True)

    def pull(self) -> None:
        """Read the newest parameters, without a step; in lockstep a worker always has them."""
        if not self._rule.aggregate or self._rule.backup:
            self._adopt_parameters()
            self._pull()

    def _pull(self, *, in_turn: bool = False) -> None:
        traced_s = tracer.start()
        self._finish(self._exchange.pull(in_turn=in_turn).wait)
        if traced_s:
            tracer.add("pull", traced_s)

    def _finish(self, wait: Any) -> list[m.Reply]:
        start = time.perf_counter()
        answers: list[list[m.Reply]] = wait()
        self.waited_s += time.perf_counter() - start
        self._take_over(self._buckets)
        replies = [reply for replies in answers for reply in replies]
        self._tell_notices(replies)
        return replies

    def begin_with_values(self, buckets: Sequence[Bucket]) -> None:
        """Let a newcomer's script see the servers' values, whatever it has in their place."""
        for bucket in buckets:
            if bucket.host is not None and bucket.host.is_changed():
                bucket.host.discard()
        self._take_over(buckets)

    def hand_over(self, *, speaks: bool, meet: Callable[[], Any]) -> None:
        """Let the servers have what the script has loaded, the same on all workers. Collective:
        one `speaks`, and the others `meet` it before they read."""
        meet()  # nobody computes with the old values any more
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._is_edited(slot)
            if bucket.host is not None:  # perhaps one memory for all, who write the same
                bucket.params.copy_(bucket.shown)
            if speaks:
                self._exchange.assign(bucket, ())
        meet()
        self.begin_with_values(self._buckets)
        self.pull()
        meet()  # nobody pushes before all have read

    def _take_over(self, buckets: Sequence[Bucket]) -> None:
        """Let the script see the fresh parameters of these."""
        for bucket in buckets:
            if bucket.host in self._edited:
                bucket.host.discard()
                self._edited.remove(bucket.host)
            increment_version([slot.param for slot in bucket.slots])
        self._remember_params(buckets)

    def _note_staleness(self, replies: Sequence[m.Reply]) -> None:
        self.staleness = max((reply.staleness for reply in replies), default=self.staleness)

    def _tell_notices(self, replies: Sequence[m.Reply]) -> None:
        for notice in sorted({reply.notice for reply in replies} - {""}):
            warnings.warn(f"rank {self._number}: {notice}", stacklevel=2)

    # -- what the servers do not know of ------------------------------------------------------

    @property
    def _speaks(self) -> bool:
        """Whether this worker tells what it has changed; in lockstep one does, for all."""
        if not self._rule.aggregate or self._rule.all_speak:
            return True
        return self._number in self._exchange.speakers

    def _settings(self) -> list[dict[str, Any]] | None:
        """Return the settings of the param groups; None when they are as before."""
        optimizer = self._optimizer()
        assert optimizer is not None
        settings = [settings_of(group) for group in optimizer.param_groups]
        if settings == self._told:
            return None
        self._told = settings
        return settings

    def _adopt_gradients(self) -> None:
        for bucket in self._buckets:
            if self._are_changed(bucket) and self._speaks:
                absent = self._copy_gradients(bucket)
                if self._rule.aggregate:
                    self._exchange.replace(bucket, absent)
                else:
                    self._wait([self._exchange.push(bucket, absent)])

    def _uncover_averages(self) -> None:
        """Undo what the script wrote over old averages, so that the fresh ones show through.

        It zeroed them, or changed them in a step that it then left out.
        """
        for bucket in self._buckets:
            host, version = bucket.host_averaged, bucket.averaged._version
            is_clean = not self._is_pushed and version == self._seen.get(bucket)
            if host is None or (is_clean and bucket not in self._covered):
                continue
            if host.is_changed():
                host.discard()
            self._seen[bucket] = version
        self._covered.clear()

    def _are_changed(self, bucket: Bucket) -> bool:
        """Say whether the script has changed gradients, seen by autograd or behind its back."""
        changed = [self._is_changed(slot) for slot in bucket.slots]
        if bucket.host_averaged is not None and bucket.host_averaged.is_changed():
            self._covered.add(bucket)
        return any(changed) or bucket in self._covered

    def _is_changed(self, slot: Slot) -> bool:
        """Say whether the script has changed a gradient, and bring it home if it is elsewhere."""
        grad = slot.param.grad
        had, version = self._grad_versions.get(slot, (False, 0))
        if grad is None:
            return had
        if grad.data_ptr() != slot.averaged.data_ptr():
            slot.averaged.copy_(grad)
        return not had or slot.averaged._version != version

    def _push_again(self) -> None:
        """Hand over gradients that were not pushed in a backward pass since the last step."""
        works = []
        for bucket in self._buckets:
            if all(slot.param.grad is None for slot in bucket.slots):
                continue
            self._are_changed(bucket)
            absent = self._copy_gradients(bucket)
            works.append(self._exchange.push(bucket, absent))
            if self._rule.aggregate:
                self._wait([works[-1]])
            if self._rule.aggregate and self._speaks:
                self._exchange.replace(bucket, absent)  # they have been averaged before
        self._wait(works)

    def _wait(self, works: Sequence[Work[Any]]) -> None:
        start, traced_s = time.perf_counter(), tracer.start()
        for work in works:
            work.wait()
        self.waited_s += time.perf_counter() - start
        if traced_s and works:
            tracer.add("wait", traced_s, behind="push")

    def _copy_gradients(self, bucket: Bucket) -> list[int]:
        """Put what the script has as gradients where they are pushed from; return who has none.

        Not into the shared averages: other workers may not have looked at them yet.
        """
        if bucket.averaged.data_ptr() != bucket.grads.data_ptr():
            bucket.grads.copy_(bucket.averaged)
            for slot in bucket.slots:
                slot.stale = True
        return [n for n, slot in enumerate(bucket.slots) if slot.param.grad is None]

    def _adopt_parameters(self) -> None:
        for bucket in self._buckets:
            changed = [n for n, slot in enumerate(bucket.slots) if self._is_edited(slot)]
            if bucket.host is not None:
                if not bucket.host.is_changed():
                    continue
                self._edited.append(bucket.host)
                changed = [n for n, slot in enumerate(bucket.slots) if _is_covered(slot)]
            if changed and self._speaks:
                bucket.params.copy_(bucket.shown)  # the servers' own memory, on one host
                self._warn_of_edits(bucket.slots[changed[0]])
                self._exchange.assign(bucket, changed)

    def _is_edited(self, slot: Slot) -> bool:
        """Say whether the script has changed a parameter, and bring it home if it moved it."""
        if slot.param.data_ptr() != slot.home.data_ptr():  # param.data = another tensor
            slot.home.copy_(slot.param.detach())
            slot.param.data = slot.home
            return True
        return slot.param._version != self._param_versions[slot]

    def expect_edits(self) -> None:
        """Do not warn of values that replace the servers': on a mesh copies of the same numbers
        are brought together behind each step."""
        self._has_warned = True

    def _warn_of_edits(self, slot: Slot) -> None:
        if not self._rule.aggregate and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rank {self._number}: the script changed {slot.name} itself; its values replace"
                " the servers', and with them what other workers have done meanwhile",
                stacklevel=2,
            )

    # -- plumbing -----------------------------------------------------------------------------

    def _slots(self) -> Iterator[Slot]:
        for bucket in self._buckets:
            yield from bucket.slots

    def _remember_params(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for slot in bucket.slots:
                self._param_versions[slot] = slot.param._version

    def _run_hooks_of(self, step: Step) -> Any:
        """Run the optimizer's own step with nothing to update: hooks and schedulers want it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        everything = [group["params"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group["params"] = []
            return step()
        finally:
            for group, params in zip(optimizer.param_groups, everything, strict=True):
                group["params"] = params


def _is_covered(slot: Slot) -> bool:
    """Say whether the script's view of a parameter is not what the servers last wrote."""
    return not torch.equal(slot.home, slot.place.view(slot.bucket.params))


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group as plain values."""
    plain: dict[str, Any] = {}
    for name, value in group.items():
        if name == "params" or name == "param_names":
            continue
        if isinstance(value, torch.Tensor):
            value = value.item()
        if not isinstance(value, bool | int | float | str | tuple | list | None):
            raise UsageError(
                f"the optimizer's setting {name} is {value!r:.80}, which cannot be sent to the"
                " servers; settings must be numbers, texts or lists of them"
            )
        plain[name] = list(value) if isinstance(value, tuple) else value
    return plain
