"""The other collectives of Paceline beside gloo's, on one host.

    python bench/collectives.py [--quick]          two and four ranks, 1 KB to 64 MB

"paceline" works on tensors in engine memory, "paceline ordinary" on any, "paceline-torch" is our
backend under torch.distributed, as is gloo. A sample is one call, begun by all ranks together.
The size is that of the larger tensor of a rank (see harness/operations.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from harness import contenders, figures
from harness.operations import COLLECTIVES
from harness.ranks import RankSet
from harness.report import Section, machine, write_json
from harness.rounds import Plan, collective, interleave
from harness.session import Session

_MB = 1 << 20
_PLANS = [
    Plan(1 << 10, rounds=6, samples=20, warmup=3),
    Plan(64 << 10, rounds=6, samples=10, warmup=2),
    Plan(1 * _MB, rounds=6, samples=5),
    Plan(16 * _MB, rounds=4, samples=2),
    Plan(64 * _MB, rounds=4, samples=1, warmup=0),
]
_QUICK = [Plan(1 << 10, rounds=2, samples=3), Plan(1 * _MB, rounds=2, samples=2)]


def start(session: Session, world: int) -> dict[str, RankSet]:
    """Start gloo and ourselves; return those that came up."""
    print(f"\nstarting {world} ranks of each contender ...", flush=True)
    makers = (contenders.paceline, contenders.paceline_torch, contenders.gloo)
    sets = [session.start(make, world, session.scratch) for make in makers]
    return session.wait_until_ready(sets)


def measure(op: str, world: int, ready: dict[str, RankSet], plans: Sequence[Plan]) -> Section:
    """Measure one operation over all sizes."""
    alive = {name: ranks for name, ranks in ready.items() if not ranks.has_failed}
    runners = [collective(name, ranks, op) for name, ranks in alive.items() if name != "paceline"]
    if ranks := alive.get("paceline"):
        ordinary = collective("paceline ordinary", ranks, op)
        runners = [collective("paceline", ranks, op, "engine"), ordinary, *runners]
    section = Section(f"{op}, {world} ranks", runners)
    for plan in plans[:1] if op == "barrier" else plans:
        interleave(runners, plan)
        section.add(plan.num_bytes)
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples of small sizes")
    parser.add_argument("--ops", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4, 8), default=(2, 4))
    options = parser.parse_args()
    plans, facts = _QUICK if options.quick else _PLANS, machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))

    sections: list[Section] = []
    versions: dict[str, str] = {}
    for world in options.ranks:
        with Session() as session:
            ready = start(session, world)
            versions.update({name: ranks.version for name, ranks in ready.items()})
            sections += [measure(op, world, ready, plans) for op in options.ops]

    rows = [
        (
            f"{section.title}, {ours} / gloo",
            "must 1, goal 3",
            figures.against(section, ours, ["gloo"]),
        )
        for section in sections
        for ours in ("paceline", "paceline-torch")
    ]
    figures.show(rows)
    content = {
        "machine": facts,
        "quick": options.quick,
        "versions": versions,
        "sections": [section.as_json() for section in sections],
    }
    print("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"written to {write_json('collectives', content)}")


if __name__ == "__main__":
    main()
