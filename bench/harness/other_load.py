"""How much processor time other programs took during a measurement, from /proc.

Other virtual machines on the same processors count, too (steal). A measurement beside other work
shows that work. `share` allows a rule that leaves it out without a look at its result.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_OTHERS = 0.05  # share of the processors that others may take during a measurement


class OtherLoad:
    """The share of all cores that others used, since this object was made.

    What the process `family` and its descendants use is the measurement's own.
    """

    def __init__(self, family: int) -> None:
        self._family = family
        self._begin = self._now()

    def share(self) -> float:
        """Return the share of all cores' time since the beginning: 0 to 1."""
        begin_s, busy, own = self._begin
        now_s, busy_now, own_now = self._now()
        ticks = (now_s - begin_s) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        return max(0.0, (busy_now - busy) - (own_now - own)) / ticks

    def _now(self) -> tuple[float, int, int]:
        """Return the time, and ticks of all programs and of the family."""
        now_s = time.monotonic()
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, _, _, steal = map(int, words[:8])
        return now_s, user + nice + system + steal, self._own_ticks()

    def _own_ticks(self) -> int:
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has just ended; its parent has its time then
            fields = stat.rpartition(")")[2].split()
            parents[int(entry)] = int(fields[1])
            ticks[int(entry)] = sum(map(int, fields[11:15]))  # own, and of children that ended
        return sum(used for pid, used in ticks.items() if self._is_family(pid, parents))

    def _is_family(self, pid: int, parents: dict[int, int]) -> bool:
        while pid in parents:
            if pid == self._family:
                return True
            pid = parents[pid]
        return False


def wait_until_alone(family: int, patience_s: float, over_s: float = 1.0) -> None:
    """Wait for a second without others, but not longer than `patience_s`."""
    give_up_s = time.monotonic() + patience_s
    while time.monotonic() < give_up_s:
        others = OtherLoad(family)
        time.sleep(over_s)
        if others.share() <= MOST_OTHERS:
            return
