"""optimizer.step() when parameter servers run the optimizer.

The step ends with a COMMIT: what was pushed during backward counts, with the learning rates that
the optimizer object has now; the servers update, and fresh parameters come back. Before that, this
worker checks whether the script has changed anything that the servers do not know of:

    gradients    clipped, unscaled, set to None: the servers get the changed ones
    parameters   loaded, clamped: the servers replace theirs

In lockstep all workers have done the same to the same averages, and the first worker that is left
sends it for all. Free-running, each worker sends its own; parameters that one worker changes
replace what the others have achieved meanwhile, so the worker warns once.
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
from paceline.data_parallel.bucket import Bucket, ParamSlot
from paceline.data_parallel.update.step import Step, Update, stepping_on
from paceline.errors import NonFiniteGradient, UsageError
from paceline.observe.telemetry.trace import tracer
from paceline.pace.parameter_server import ServerExchange
from paceline.ps import messages as m
from paceline.ps.spec import Rule
from paceline.runtime.work import Work


class ServedUpdate(Update):
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
        self._number = number  # of this worker
        self._buckets: list[Bucket] = []
        self._sent_settings: list[dict[str, Any]] | None = None
        self._grad_versions: dict[ParamSlot, tuple[bool, int]] = {}  # had a gradient, its version
        self._param_versions: dict[ParamSlot, int] = {}
        self._has_warned = self._has_turn = False
        self._is_pushed = False  # gradients were exchanged since the last step
        self._seen: dict[Bucket, int] = {}  # versions of the averages when they were last clean
        self._covered: set[Bucket] = set()  # whose averages the script wrote to before a step
        self._edited: list[HostTensor] = []  # parameters that it wrote to since the last step
        self.staleness: int | None = None  # versions of other workers the last update had not seen
        # Where all workers last agreed, and the same at this one's last commit (server_tables.py).
        self.position: Callable[[], int] = lambda: 0
        self.committed_at = -1
        # In lockstep: whether this worker was asked to stop; otherwise each stops by itself.
        self.wants_stop: Callable[[], bool] = lambda: False
        self.is_stop_agreed = False  # some worker was, and all know it after the same step

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Update these buckets from now on."""
        self._buckets += buckets
        self._remember_params(buckets)

    def remember_gradients(self) -> None:
        """Record the gradients as the exchange left them; called at the end of backward."""
        self._show_fresh_averages()
        self._is_pushed = True
        for slot in self._slots():
            self._grad_versions[slot] = (slot.param.grad is not None, slot.averaged._version)

    def check_finite(self) -> None:
        """Raise, or skip the step, when gradients are not finite; the same on all workers."""
        nonfinite = self._exchange.nonfinite
        if not nonfinite:
            return
        if self._rule.nonfinite == "raise":
            raise NonFiniteGradient(f"{nonfinite}; the step is not applied on any server")
        for slot in self._slots():
            slot.param.grad = None
        if self._speaks:
            warnings.warn(f"{nonfinite}; the step is left out on all ranks", stacklevel=2)

    def run(self, step: Step) -> Any:
        if self._exchange.nonfinite:  # no worker commits: the next pushes replace these
            return self._run_hooks_of(step)
        self._send_edited_parameters()
        if self._is_pushed and not self._exchange.pushes_late:
            self._send_edited_gradients()
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
        """Wait for parameters that have not arrived yet; here there are none."""

    def close(self) -> None:
        """Remove what this update added to the model."""

    def before_forward(self) -> None:
        """Wait for this worker's turn, if the pace has turns, before the step that begins here."""
        if self._rule.unit == "version" and not self._has_turn:
            self._has_turn = True
            self._send_edited_parameters()
            self._pull(in_turn=True)

    def pull(self) -> None:
        """Read the newest parameters, without a step; in lockstep a worker always has them."""
        if not self._rule.aggregate or self._rule.backup:
            self._send_edited_parameters()
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
        self._show_fresh_values(self._buckets)
        replies = [reply for replies in answers for reply in replies]
        self._warn_of_notices(replies)
        return replies

    def begin_with_values(self, buckets: Sequence[Bucket]) -> None:
        """Show a newcomer's script the servers' values instead of its own."""
        for bucket in buckets:
            if bucket.host is not None and bucket.host.is_changed():
                bucket.host.discard()
        self._show_fresh_values(buckets)

    def replace_server_values(self, *, speaks: bool, wait_for_all: Callable[[], Any]) -> None:
        """Replace the servers' values by those that the script has loaded, the same on all workers.

        Collective: one worker `speaks`, and the others wait for it before they read.
        """
        wait_for_all()  # no worker computes with the old values any more
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._is_edited(slot)
            if bucket.host is not None:  # perhaps one memory for all workers, which write the same
                bucket.params.copy_(bucket.shown)
            self._exchange.collect(bucket)
            if speaks:
                self._exchange.assign(bucket, ())
        wait_for_all()
        self.begin_with_values(self._buckets)
        self.pull()
        wait_for_all()  # no worker pushes before all have read

    def _show_fresh_values(self, buckets: Sequence[Bucket]) -> None:
        """Show the script the fresh parameters of these buckets."""
        self._exchange.show(buckets)
        for bucket in buckets:
            if bucket.host in self._edited:
                bucket.host.discard()
                self._edited.remove(bucket.host)
            increment_version([slot.param for slot in bucket.slots])
        self._remember_params(buckets)

    def _note_staleness(self, replies: Sequence[m.Reply]) -> None:
        self.staleness = max((reply.staleness for reply in replies), default=self.staleness)

    def _warn_of_notices(self, replies: Sequence[m.Reply]) -> None:
        for notice in sorted({reply.notice for reply in replies} - {""}):
            warnings.warn(f"rank {self._number}: {notice}", stacklevel=2)

    # -- changes that the servers do not know of ----------------------------------------------

    @property
    def _speaks(self) -> bool:
        """Whether this worker sends what the script has changed; in lockstep one does, for all."""
        if not self._rule.aggregate or self._rule.all_speak:
            return True
        return self._number in self._exchange.speakers

    def _settings(self) -> list[dict[str, Any]] | None:
        """Return the settings of the param groups; None when they have not changed."""
        optimizer = self._optimizer()
        assert optimizer is not None
        settings = [settings_of(group) for group in optimizer.param_groups]
        if settings == self._sent_settings:
            return None
        self._sent_settings = settings
        return settings

    def _send_edited_gradients(self) -> None:
        for bucket in self._buckets:
            if self._are_changed(bucket) and self._speaks:
                absent = self._copy_gradients(bucket)
                if self._rule.aggregate:
                    self._exchange.replace(bucket, absent)
                else:
                    self._wait([self._exchange.push(bucket, absent)])

    def _show_fresh_averages(self) -> None:
        """Discard what the script wrote over old averages, so that the fresh ones show through.

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
        """Return whether the script has changed gradients, also in ways autograd does not see."""
        changed = [self._is_changed(slot) for slot in bucket.slots]
        if bucket.host_averaged is not None and bucket.host_averaged.is_changed():
            self._covered.add(bucket)
        return any(changed) or bucket in self._covered

    def _is_changed(self, slot: ParamSlot) -> bool:
        """Return whether the script has changed a gradient; copy it back if it is elsewhere."""
        grad = slot.param.grad
        had, version = self._grad_versions.get(slot, (False, 0))
        if grad is None:
            return had
        if grad.data_ptr() != slot.averaged.data_ptr():
            slot.averaged.copy_(grad)
        return not had or slot.averaged._version != version

    def _push_again(self) -> None:
        """Push gradients that were not pushed in a backward pass since the last step."""
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
                self._exchange.replace(bucket, absent)  # these are averages already
        self._wait(works)

    def _wait(self, works: Sequence[Work[Any]]) -> None:
        start, traced_s = time.perf_counter(), tracer.start()
        for work in works:
            work.wait()
        self.waited_s += time.perf_counter() - start
        if traced_s and works:
            tracer.add("wait", traced_s, behind="push")

    def _copy_gradients(self, bucket: Bucket) -> list[int]:
        """Copy the script's gradients to where they are pushed from; return which are missing.

        Not into the shared averages: other workers may not have looked at them yet.
        """
        if bucket.averaged.data_ptr() != bucket.grads.data_ptr():
            bucket.grads.copy_(bucket.averaged)
            for slot in bucket.slots:
                slot.stale = True
        return [n for n, slot in enumerate(bucket.slots) if slot.param.grad is None]

    def _send_edited_parameters(self) -> None:
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

    def _is_edited(self, slot: ParamSlot) -> bool:
        """Return whether the script has changed a parameter; move it back if it was reassigned."""
        return slot.bring_home() or slot.param._version != self._param_versions[slot]

    def expect_edits(self) -> None:
        """Disable the warning about edits: on a mesh, replicas of the same parameter are
        synchronised after each step."""
        self._has_warned = True

    def _warn_of_edits(self, slot: ParamSlot) -> None:
        if not self._rule.aggregate and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rank {self._number}: the script changed {slot.name} itself; its values replace"
                " the servers', and with them what other workers have done meanwhile",
                stacklevel=2,
            )

    # -- helpers ------------------------------------------------------------------------------

    def _slots(self) -> Iterator[ParamSlot]:
        for bucket in self._buckets:
            yield from bucket.slots

    def _remember_params(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for slot in bucket.slots:
                self._param_versions[slot] = slot.param._version

    def _run_hooks_of(self, step: Step) -> Any:
        """Run the optimizer's own step with nothing to update: hooks and schedulers expect it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        with stepping_on(optimizer, [[] for _ in optimizer.param_groups]):
            return step()


def _is_covered(slot: ParamSlot) -> bool:
    """Return whether the script's view of a parameter is not what the servers last wrote here.

    If the worker maps the servers' memory they write nothing here: then all parameters count.
    """
    return not torch.equal(slot.shown, slot.segment.view(slot.bucket.params))


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
