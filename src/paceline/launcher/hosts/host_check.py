"""What keeps a job from running on its hosts: all problems of all hosts, in one report.

Pure functions over what the agents found (messages.HostFacts) and the probes between the hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.launcher.hosts.messages import HostFacts, ProbeResult
from paceline.launcher.hosts.reach import host_part

MAX_SKEW_S = 5.0  # of clocks; more makes records and checkpoints of several hosts hard to read
_LOW_MEMORY_BYTES = 256 << 20
_LOW_SHM_BYTES = 16 << 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one host."""

    host: str
    text: str


def report(problems: Sequence[Problem]) -> str:
    """Return a table of all problems, by host."""
    width = max(len(problem.host) for problem in problems)
    count = len({problem.host for problem in problems})
    head = f"{count} host{'s' if count != 1 else ''} cannot run the job; nothing was started"
    lines = [f"  {problem.host:{width}}  {problem.text}" for problem in problems]
    return "\n".join([head, *lines])


def fact_problems(name: str, facts: HostFacts) -> list[Problem]:
    """Return what the agent of a host found wrong there."""
    found = [Problem(name, text) for text in facts.problems]
    if facts.shm_bytes < _LOW_SHM_BYTES:
        text = f"/dev/shm has {facts.shm_bytes >> 20} MB free, at least {_LOW_SHM_BYTES >> 20} are"
        found.append(Problem(name, f"{text} needed; remove old files there or make it larger"))
    return found


def warnings(name: str, facts: HostFacts, now_s: float) -> list[str]:
    """Return lines about a host that can run the job, but not well."""
    found = []
    skew_s = facts.clock_s - now_s
    if abs(skew_s) > MAX_SKEW_S:
        direction = "ahead of" if skew_s > 0 else "behind"
        found.append(
            f"host {name}: its clock is {abs(skew_s):.0f} s {direction} the launcher's; times in"
            " logs will not match"
        )
    if 0 < facts.memory_bytes < _LOW_MEMORY_BYTES:
        found.append(f"host {name}: only {facts.memory_bytes >> 20} MB of memory are available")
    return found


def twins(facts: Mapping[str, HostFacts]) -> list[Problem]:
    """Return a problem for each name that leads to a machine with another name in the list."""
    seen: dict[str, str] = {}
    found = []
    for name, one in facts.items():
        first = seen.setdefault(one.host_id, name)
        if first != name:
            text = f"is the same machine as {first}; name it once, with the slots of both"
            found.append(Problem(name, text))
    return found


def launcher_address(
    candidates: Sequence[str], reached: Mapping[str, Iterable[str]]
) -> tuple[str, list[Problem]]:
    """Return the address of the launcher that every host reached, else a problem for each host.

    `reached` has by host name the addresses that its agent reached.
    """
    sets = {name: set(found) for name, found in reached.items()}
    common = [one for one in candidates if all(one in found for found in sets.values())]
    if common:
        return common[0], []
    return "", [
        Problem(
            name,
            f"reaches the launcher at {', '.join(sorted(found))}, other hosts do not; give"
            " the launcher's host an address that all hosts reach",
        )
        for name, found in sets.items()
    ]


def host_addresses(
    names: Mapping[int, str],
    listening: Mapping[int, Sequence[str]],
    probes: Mapping[int, Sequence[ProbeResult]],
    own: Mapping[int, str],
) -> tuple[dict[int, str], list[Problem]]:
    """Return for each host the first of its addresses that all other hosts reached.

    `names` and `listening` (host:port) are by host; `probes` by the host that probed; `own` has by
    the same index the address from which it did.
    """
    chosen: dict[int, str] = {}
    problems: list[Problem] = []
    for index, addresses in listening.items():
        results = {
            (prober, result.address): result.error
            for prober, found in probes.items()
            for result in found
            if result.host_index == index
        }
        probers = [prober for prober in probes if prober != index]
        good = [a for a in addresses if all(results.get((p, a), "?") == "" for p in probers)]
        if good:
            chosen[index] = host_part(good[0])
            continue
        for prober in probers:
            tries = [(a, results.get((prober, a), "not tried")) for a in addresses]
            if all(error for _, error in tries):
                words = ", ".join(f"{a} ({error})" for a, error in tries)
                problems.append(
                    Problem(
                        names[prober],
                        f"from {own[prober]} does not reach {names[index]} at {words}; open the"
                        " ports between these hosts",
                    )
                )
        if not any(problem.text.find(names[index]) >= 0 for problem in problems):
            problems.append(
                Problem(names[index], "has no address that all other hosts reach; give it one")
            )
    return chosen, problems
