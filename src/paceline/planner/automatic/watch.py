"""When to plan again. The workers meet after some steps and compare notes; all see the same ones.

They measure the links again if the workers are on other hosts, if steps have taken much longer or
shorter for two meetings in a row, or if so much time has passed that measuring costs less than 1 %
of it. They choose again if the hosts or the links are others by much. After each change of the pace
the next one has to wait twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from paceline.planner.quantities import Link, rate_text

MEETING_STEPS = 25
_STEP_FACTOR = 1.5  # a step of another length
_LINK_FACTOR = 2.0  # a link of another rate
_MEETINGS = 2  # in a row
_PROBE_SHARE = 0.01  # of the time, for measuring links again
_HOLD_STEPS = 50  # after the first change; doubled by each
_MOST_DOUBLINGS = 6

Placement = dict[str, int]  # workers by host


class LinkFound(msgspec.Struct, frozen=True, array_like=True):
    """The measured link of two hosts."""

    one: str
    other: str
    bytes_per_s: float
    latency_s: float
    spread: float = 0.0  # relative, of the rate


class WatchState(msgspec.Struct, frozen=True):
    """What the workers agreed on last; the same on all, and sent to newcomers."""

    version: int = 0  # grows with each meeting
    pace: str = ""  # chosen
    placement: Placement = {}
    links: tuple[LinkFound, ...] = ()
    usual_s: float = 0.0  # of a step, since the choice; 0: not known yet
    odd_meetings: int = 0  # in a row, at which steps had another length
    probe_s: float = 0.0  # what measuring the links took
    since_probe_s: float = 0.0
    changes: int = 0
    changed_at: int = 0  # step of the last change

    def may_change(self, step: int) -> bool:
        """Return whether the last change is long enough ago."""
        if not self.changes:
            return True
        hold = _HOLD_STEPS << min(self.changes - 1, _MOST_DOUBLINGS)
        return step - self.changed_at >= hold


def after_window(
    state: WatchState, placement: Mapping[str, int], step_s: float, elapsed_s: float
) -> tuple[WatchState, str]:
    """Return the state after some more steps, and why to measure the links again; "": do not.

    `step_s` is the usual step since the last meeting, `elapsed_s` the time since then.
    """
    usual_s = state.usual_s or step_s
    is_odd = not usual_s / _STEP_FACTOR <= step_s <= usual_s * _STEP_FACTOR
    odd = state.odd_meetings + 1 if is_odd else 0
    since_s = state.since_probe_s + elapsed_s
    now = msgspec.structs.replace(
        state,
        version=state.version + 1,
        usual_s=usual_s,
        odd_meetings=odd,
        since_probe_s=since_s,
    )
    if dict(placement) != state.placement:
        return now, "hosts"
    if len(placement) < 2:
        return now, ""
    if odd >= _MEETINGS:
        return now, "steps"
    if state.probe_s and state.probe_s <= _PROBE_SHARE * since_s:
        return now, "time"
    return now, ""


def describe_change(
    state: WatchState, placement: Mapping[str, int], links: Sequence[LinkFound]
) -> str:
    """Return what has changed by much since the last choice; "": nothing."""
    if dict(placement) != state.placement:
        before, after = sum(state.placement.values()), sum(placement.values())
        return (
            f"{after} workers on {_hosts(len(placement))} instead of {before} on"
            f" {_hosts(len(state.placement))}"
        )
    then = {(link.one, link.other): link for link in state.links}
    factors = [
        (max(link.bytes_per_s / old.bytes_per_s, old.bytes_per_s / link.bytes_per_s), link, old)
        for link in links
        if (old := then.get((link.one, link.other))) is not None
    ]
    if not factors:
        return ""
    factor, link, old = max(factors, key=lambda one: one[0])
    if factor < _LINK_FACTOR:
        return ""
    return (
        f"the link between {link.one} and {link.other} has {rate_text(link.bytes_per_s)}"
        f" instead of {rate_text(old.bytes_per_s)}"
    )


def links_of(links: Sequence[LinkFound]) -> dict[tuple[str, str], Link]:
    """Return measured links as a cluster has them."""
    return {(one.one, one.other): Link(one.bytes_per_s, one.latency_s) for one in links}


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"
