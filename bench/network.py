"""All-reduce between two network namespaces joined by a virtual cable, as if between two machines.

    sudo python bench/network.py [--quick]

First as fast as the kernel goes, then at 1 Gbit/s. "plain TCP exchange" sends as many bytes each
way over one connection as an all-reduce of two ranks has to, without adding anything: what the link
can carry. iperf3 is asked too when it is installed. The namespaces vanish with this process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness import figures
from harness.iperf import Iperf
from harness.namespaces import Cable, can_shape
from harness.ranks import RankSet
from harness.report import Section, machine, write_json
from harness.rounds import Plan, Runner, collective, interleave
from harness.session import Session

_MB = 1 << 20
_RATE_MBIT = 1000
_PLANS = [
    Plan(16 * _MB, rounds=8, samples=3),
    Plan(64 * _MB, rounds=5, samples=2, warmup=0),
    Plan(256 * _MB, rounds=4, samples=1, warmup=0),
]
_SHAPED = [Plan(16 * _MB, rounds=4, samples=2), Plan(64 * _MB, rounds=4, samples=1, warmup=0)]
_QUICK = [Plan(4 * _MB, rounds=2, samples=2)]


def ranks_over(cable: Cable, name: str, kind: str, scratch: Path) -> RankSet:
    """Start one rank at each end of the cable."""
    return RankSet(name, kind, 2, cable.ranks(name, scratch), scratch)


def start(session: Session, cable: Cable) -> list[Runner]:
    """Start all contenders and return their lines of the table."""
    print("\nstarting 2 ranks of each contender ...", flush=True)
    kinds = {"paceline": "paceline", "gloo": "torch-gloo", "tcp": "tcp"}
    sets = [
        session.start(ranks_over, cable, name, kind, session.scratch)
        for name, kind in kinds.items()
    ]
    ready = session.wait_until_ready(sets)
    runners: list[Runner] = []
    if ranks := ready.get("paceline"):
        runners.append(collective("paceline", ranks, "all_reduce", "engine"))
        runners.append(collective("paceline ordinary", ranks, "all_reduce"))
    if ranks := ready.get("gloo"):
        runners.append(collective("gloo", ranks, "all_reduce"))
    if ranks := ready.get("tcp"):
        runners.append(collective("plain TCP exchange", ranks, "exchange"))
    return runners


def line_rate() -> Runner:
    """The time that the link itself needs: the baseline of all contenders."""

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
    parser.add_argument("--quick", action="store_true", help="few samples of a small size")
    quick = parser.parse_args().quick
    if why := can_shape():
        raise SystemExit(f"network: cannot run here: {why}")
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))

    with Cable() as cable, Session() as session:
        runners = start(session, cable)
        if Iperf.is_installed():
            runners += session.start(Iperf, cable).runners()
        else:
            print("  iperf3: skipped, not installed")
        plain = measure("all-reduce over TCP, unshaped", runners, _QUICK if quick else _PLANS)
        cable.shape(_RATE_MBIT)
        title = f"all-reduce over TCP at {_RATE_MBIT} Mbit/s"
        again = [Runner(r.label, r.measure, r.version) for r in runners if not r.has_failed]
        shaped = measure(title, [*again, line_rate()], _QUICK if quick else _SHAPED)

    ours, against = "paceline", figures.against
    rows = [
        ("unshaped / gloo", "must 1.5", against(plain, ours, ["gloo"])),
        ("unshaped / iperf3 one way", "goal 0.8", against(plain, ours, ["iperf3 one"])),
        ("unshaped / iperf3 both ways", "", against(plain, ours, ["iperf3 both"])),
        ("unshaped / plain TCP exchange", "", against(plain, ours, ["plain"])),
        ("1 Gbit/s / line rate", "must 0.90, goal 0.95", against(shaped, ours, ["limit"])),
        ("1 Gbit/s / plain TCP exchange", "", against(shaped, ours, ["plain"])),
    ]
    figures.show(rows)
    versions = {runner.label: runner.version for runner in runners}
    sections = [plain.as_json(), shaped.as_json()]
    content = {"machine": facts, "quick": quick, "versions": versions, "sections": sections}
    print(f"written to {write_json('network', content)}")


if __name__ == "__main__":
    main()
