"""The job that measures hosts and the links between them: one worker on each host, pair by pair.

Run by the launcher as a module (`paceline plan --hosts a,b`). Rank 0 prints what was found, because
the planner need not share a file system with its host:

    paceline-host RANK CORES MEMORY_BYTES
    paceline-link RANK RANK BYTES_PER_S LATENCY_S SPREAD

With an argument, rank 0 writes the links to that file as JSON too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"paceline-(host|link)((?: [0-9.e+-]+)+)$")


class ProbedHosts(NamedTuple):
    """What the lines of a probe contain."""

    hosts: dict[int, tuple[int, int]]  # by rank: cores, bytes of memory (0: unknown)
    links: list[tuple[int, int, float, float, float]]


def read_probe(lines: Iterable[str]) -> ProbedHosts:
    """Return what a probe printed; other lines do not count, nor does what is before the words.

    >>> read_probe(["[0] paceline-host 0 2 4096", "[0] paceline-link 0 1 1e9 5e-5 0.1"]).links
    [(0, 1, 1000000000.0, 5e-05, 0.1)]
    """
    hosts, links = {}, []
    for line in lines:
        found = _LINE.search(line.rstrip())
        if found is None:
            continue
        words = [float(word) for word in found[2].split()]
        if found[1] == "host" and len(words) == 3:
            hosts[int(words[0])] = (int(words[1]), int(words[2]))
        elif found[1] == "link" and len(words) == 5:
            low, high, rate, latency_s, spread = words
            links.append((int(low), int(high), rate, latency_s, spread))
    return ProbedHosts(hosts, links)


def main() -> None:
    """Join the job, measure all pairs, and print what was found."""
    import paceline as pl
    from paceline.comm.link_probe import measure_links
    from paceline.comm.object_collectives import all_gather_object
    from paceline.runtime.machine import memory, usable_cores

    pl.init()
    here = memory()
    limits = [one for one in (here.limit_bytes, here.total_bytes) if one is not None]
    hosts = all_gather_object(pl.world(), [usable_cores(), min(limits, default=0)])
    size = pl.world_size()
    pairs = [(low, high) for low in range(size) for high in range(low + 1, size)]
    found = measure_links(pl.world(), pairs)
    if pl.rank() == 0:
        lines = [f"paceline-host {rank} {cores} {size}" for rank, (cores, size) in enumerate(hosts)]
        lines += [f"paceline-link {' '.join(map(repr, row))}" for row in found]
        sys.stdout.write("\n".join([*lines, ""]))
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    pl.shutdown()


if __name__ == "__main__":
    main()
