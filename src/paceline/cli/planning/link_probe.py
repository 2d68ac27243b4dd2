"""The job that measures links between hosts: one worker on each host, pair by pair.

Run by the launcher as a module (`paceline plan --hosts a,b`). Rank 0 writes a JSON file: its
argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Join the job, measure all pairs, and write what was found."""
    import paceline as pl
    from paceline.comm.link_probe import measure_links

    pl.init()
    size = pl.world_size()
    pairs = [(low, high) for low in range(size) for high in range(low + 1, size)]
    found = measure_links(pl.world(), pairs)
    if pl.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    pl.shutdown()


if __name__ == "__main__":
    main()
