"""All-reduce over two hosts with two processes each, plain and encrypted.

    sudo python bench/hosts.py [--quick]
    sudo python bench/hosts.py --engine ray      # whole jobs on a Ray cluster instead: ray_jobs.py

The hosts are network namespaces joined by a virtual cable: first as fast as the kernel goes, then
at 1 Gbit/s. "plain sockets" are two connections, one for each pair of processes, that exchange as
many bytes between the hosts as an all-reduce that sends each byte once per host: its size, each
way. Nothing is added up there. The namespaces vanish with this process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness import figures
from harness.namespaces import Cable, can_shape
from harness.ranks import RankSet
from harness.report import Section, machine, write_json
from harness.rounds import Plan, Runner, collective, interleave
from harness.session import Session

_MB = 1 << 20
_PER_HOST = 2
_RATE_MBIT = 1000
_PLANS = [
    Plan(16 * _MB, rounds=10, samples=3),
    Plan(64 * _MB, rounds=6, samples=2, warmup=0),
    Plan(256 * _MB, rounds=4, samples=1, warmup=0),
]
_SHAPED = [Plan(16 * _MB, rounds=4, samples=2), Plan(64 * _MB, rounds=4, samples=1, warmup=0)]
_QUICK = [Plan(16 * _MB, rounds=3, samples=2)]
_PLAIN, _ENCRYPTED, _SOCKETS = "paceline plain", "paceline encrypted", "plain sockets"
# label: kind of rank, setting of PACELINE_ENCRYPT
_CONTENDERS = {
    _PLAIN: ("paceline", "off"),
    _ENCRYPTED: ("paceline", "on"),
    "gloo": ("torch-gloo", "on"),
    _SOCKETS: ("tcp", "on"),
}


def start(session: Session, cable: Cable) -> list[Runner]:
    """Start all contenders and return their lines of the table."""
    print(f"\nstarting 2 x {_PER_HOST} ranks of each contender ...", flush=True)

    def ranks(label: str, port: int, scratch: Path) -> RankSet:
        name, (kind, setting) = label.replace(" ", "-"), _CONTENDERS[label]
        env = {"PACELINE_ENCRYPT": setting}
        processes = cable.ranks(name, scratch, port, per_host=_PER_HOST, env=env)
        return RankSet(label, kind, 2 * _PER_HOST, processes, scratch)

    sets = [
        session.start(ranks, label, 18600 + number, session.scratch)
        for number, label in enumerate(_CONTENDERS)
    ]
    ready = session.wait_until_ready(sets)
    return [_runner(label, found) for label, found in ready.items()]


def _runner(label: str, ranks: RankSet) -> Runner:
    if label != _SOCKETS:
        memory = "engine" if label.startswith("paceline") else "ordinary"
        return collective(label, ranks, "all_reduce", memory)
    pair = collective(label, ranks, "exchange")

    def measure(plan: Plan, seed: int) -> list[float]:
        return pair.measure(replace(plan, num_bytes=plan.num_bytes // _PER_HOST), seed)

    return Runner(label, measure, ranks.version)


def line_rate() -> Runner:
    """The time that the link itself needs."""

    def measure(plan: Plan, _: int) -> list[float]:
        return [plan.num_bytes * 8 / (_RATE_MBIT * 1e6)]

    return Runner("limit: line rate", measure, "tbf")


def measure(title: str, runners: Sequence[Runner], plans: Sequence[Plan]) -> Section:
    section = Section(title, runners)
    for plan in plans:
        interleave(runners, plan)
        section.add(plan.num_bytes)
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples of 16 MB")
    parser.add_argument("--engine", choices=("ray",), help="measure jobs on this engine instead")
    options = parser.parse_args()
    quick = options.quick
    if why := can_shape():
        raise SystemExit(f"hosts: cannot run here: {why}")
    if options.engine == "ray":
        import ray_jobs

        ray_jobs.main(quick=quick)
        return
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))

    with Cable() as cable, Session() as session:
        runners = start(session, cable)
        title = f"all-reduce over 2 hosts x {_PER_HOST} processes, unshaped"
        unshaped = measure(title, runners, _QUICK if quick else _PLANS)
        cable.shape(_RATE_MBIT)
        again = [Runner(r.label, r.measure, r.version) for r in runners if not r.has_failed]
        title = f"all-reduce over 2 hosts x {_PER_HOST} processes at {_RATE_MBIT} Mbit/s"
        shaped = measure(title, [*again, line_rate()], _QUICK if quick else _SHAPED)

    against = figures.against
    rows = [
        ("plain / plain sockets", "must 0.90, goal 0.97", against(unshaped, _PLAIN, [_SOCKETS])),
        ("plain / gloo", "must 1.3", against(unshaped, _PLAIN, ["gloo"])),
        ("encrypted / plain", "must 0.60, goal 0.80", against(unshaped, _ENCRYPTED, [_PLAIN])),
        (
            "1 Gbit/s, encrypted / line rate",
            "must 0.90, goal 0.94",
            against(shaped, _ENCRYPTED, ["limit"]),
        ),
        ("1 Gbit/s, encrypted / plain", "", against(shaped, _ENCRYPTED, [_PLAIN])),
    ]
    figures.show(rows)
    versions = {runner.label: runner.version for runner in runners}
    sections = [unshaped.as_json(), shaped.as_json()]
    content = {"machine": facts, "quick": quick, "versions": versions, "sections": sections}
    print(f"written to {write_json('hosts', content)}")


if __name__ == "__main__":
    main()
