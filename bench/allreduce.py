"""All-reduce (float32 sum, in place) of Paceline, gloo, MPI and DeepSpeed, beside the limit.

    python bench/allreduce.py              all figures, about four minutes
    python bench/allreduce.py --quick      a smoke test, under a minute
    python bench/allreduce.py --ranks 2 --sizes 1 4     1 KB, and these sizes in MB, 2 ranks

Two ranks and four, on this host. "paceline" reduces tensors in engine memory where they lie,
"paceline out" does so into another tensor, "paceline ordinary" takes any tensor, "paceline-torch"
is torch.distributed with our backend on ordinary tensors. Every rank writes fresh values before
each sample, outside of the measured time, and every result is checked. bench/README.md says more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness import contenders, figures
from harness.limit import LimitRanks, compile_limit
from harness.ranks import ContenderFailed
from harness.report import Section, machine, write_json
from harness.rounds import Plan, Runner, collective, interleave, limits
from harness.session import Session

_MB = 1 << 20
_LATENCY = [Plan(1 << 10, rounds=20, samples=3, calls=50)]
_TWO_RANKS = [
    Plan(1 * _MB, rounds=10, samples=8, warmup=2),
    Plan(4 * _MB, rounds=10, samples=5, warmup=1),
    Plan(16 * _MB, rounds=10, samples=3, warmup=1),
    Plan(64 * _MB, rounds=6, samples=2, warmup=0),
    Plan(256 * _MB, rounds=5, samples=1, warmup=0),
]
_FOUR_RANKS = [
    Plan(16 * _MB, rounds=6, samples=3, warmup=1),
    Plan(64 * _MB, rounds=4, samples=2, warmup=0),
    Plan(256 * _MB, rounds=4, samples=1, warmup=0),
]
_QUICK_LATENCY = [Plan(1 << 10, rounds=3, samples=2, calls=50)]
_QUICK_TWO = [Plan(1 * _MB, rounds=3, samples=4), Plan(16 * _MB, rounds=2, samples=1)]
_QUICK_FOUR = [Plan(16 * _MB, rounds=2, samples=1)]


class Bench:
    """What one run has measured so far."""

    def __init__(self, peers: Path) -> None:
        self.peers = peers
        self.sections: list[Section] = []
        self.versions: dict[str, str] = {}

    def measure(self, title: str, runners: Sequence[Runner], plans: Sequence[Plan]) -> Section:
        section = Section(title, runners)
        for plan in plans:
            interleave(runners, plan)
            section.add(plan.num_bytes)
        self.sections.append(section)
        self.versions.update({runner.label: runner.version for runner in runners})
        return section

    def runners(self, session: Session, world: int, variants: bool) -> list[Runner]:
        """Start all contenders and return their lines of the table."""
        print(f"\nstarting {world} ranks of each contender ...", flush=True)
        scratch = session.scratch
        own = (contenders.paceline, contenders.paceline_torch, contenders.gloo)
        sets = [session.start(make, world, scratch) for make in own]
        others, skipped = contenders.optional(self.peers, world, scratch)
        session.keep(others)
        ready = session.wait_until_ready([*sets, *others])
        for line in skipped:
            print(f"  {line}")
        runners: list[Runner] = []
        if ranks := ready.pop("paceline", None):
            runners.append(collective("paceline", ranks, "all_reduce", "engine"))
            if variants:
                runners.append(collective("paceline out", ranks, "all_reduce_out", "engine"))
                runners.append(collective("paceline ordinary", ranks, "all_reduce"))
        return runners + [collective(name, ranks, "all_reduce") for name, ranks in ready.items()]

    def limits(self, session: Session, world: int) -> list[Runner]:
        try:
            return limits(session.start(LimitRanks, compile_limit(session.scratch), world))
        except ContenderFailed as failure:
            print(f"  {failure}")
            return []


def closing_lines(
    latency: Section | None, two: Section | None, four: Section | None
) -> list[tuple[str, str, str]]:
    """The promised figures of what was measured."""
    peers, small = figures.PEERS, latency

    def against(section: Section | None, label: str, others: Sequence[str]) -> str:
        return "" if section is None else figures.against(section, label, others)

    lines = [
        ("2 ranks, engine memory / gloo", "must 5", against(two, "paceline", ["gloo"])),
        ("2 ranks, engine memory / limit", "goal 0.85", against(two, "paceline", ["limit"])),
        (
            "2 ranks, engine memory / best of MPI, DeepSpeed",
            "goal 2",
            against(two, "paceline", peers),
        ),
        ("2 ranks, torch.distributed / gloo", "must 3", against(two, "paceline-torch", ["gloo"])),
        (
            "2 ranks, torch.distributed / best of MPI, DeepSpeed",
            "goal 1",
            against(two, "paceline-torch", peers),
        ),
        ("1 KB, engine memory / gloo", "must 20", against(small, "paceline", ["gloo"])),
        ("4 ranks, engine memory / gloo", "must 3", against(four, "paceline", ["gloo"])),
        (
            "4 ranks, engine memory / best of MPI, DeepSpeed",
            "goal 2",
            against(four, "paceline", peers),
        ),
    ]
    return [line for line in lines if line[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples of small sizes")
    default = Path(__file__).parent / "peers"
    parser.add_argument("--peers", type=Path, default=default, help="where MPI and DeepSpeed are")
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="only so many ranks")
    parser.add_argument("--sizes", type=int, nargs="+", help="only these sizes, in MB")
    options = parser.parse_args()
    quick, bench, facts = options.quick, Bench(options.peers), machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))

    def chosen(plans: list[Plan]) -> list[Plan]:
        sizes = [size * _MB for size in options.sizes or ()]
        return [plan for plan in plans if not sizes or plan.num_bytes in sizes]

    latency = two = four = None
    if options.ranks != 4:
        with Session() as session:
            runners = bench.runners(session, 2, variants=True)
            small = [runner for runner in runners if runner.label != "paceline out"]
            title = "all-reduce of 1 KB, 2 ranks, called from Python, 50 calls in a row (of one)"
            latency = bench.measure(title, small, _QUICK_LATENCY if quick else _LATENCY)
            runners = [*runners, *bench.limits(session, 2)]
            plans = chosen(_QUICK_TWO if quick else _TWO_RANKS)
            two = bench.measure("all-reduce, 2 ranks", runners, plans)
    if options.ranks != 2:
        with Session() as session:
            runners = bench.runners(session, 4, variants=False) + bench.limits(session, 4)
            plans = chosen(_QUICK_FOUR if quick else _FOUR_RANKS)
            four = bench.measure("all-reduce, 4 ranks", runners, plans)

    figures.show(closing_lines(latency, two, four))
    content = {
        "machine": facts,
        "quick": quick,
        "versions": bench.versions,
        "sections": [section.as_json() for section in bench.sections],
    }
    print(
        "versions: " + ", ".join(f"{k} {v}" for k, v in bench.versions.items() if "limit" not in k)
    )
    print(f"written to {write_json('allreduce', content)}")


if __name__ == "__main__":
    main()
