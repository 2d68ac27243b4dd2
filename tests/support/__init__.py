"""Real ranks for tests, started in milliseconds.

    pytest ---- request ----> fork server (torch and paceline loaded, no thread)
      |                          | fork
      +-- results, messages --- rank 0, rank 1, ...    real processes, real sockets

`run_ranks(4, body, hosts=2)` calls `body(group)` in four ranks and returns what they return.
`started(4, body)` lets the test act while they run: signals, messages, strangers on their ports.
"""

from support.body import receive, report
from support.ranks import Outcome, RanksFailed, outcomes_of, run_processes, run_ranks, started

__all__ = [
    "Outcome",
    "RanksFailed",
    "receive",
    "outcomes_of",
    "run_processes",
    "run_ranks",
    "started",
    "report",
]
