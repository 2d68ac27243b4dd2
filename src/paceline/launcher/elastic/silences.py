"""Members that send no heartbeat: a stopped one is reported at once, a running one if it stays so.

Threads: the launcher's loop only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.control.messages import Presence
from paceline.launcher.processes.monitor import SilenceTracker

if TYPE_CHECKING:
    from paceline.launcher.elastic.job import ElasticJob


class Silences(SilenceTracker):
    """The silent members of one elastic job."""

    def __init__(self, job: ElasticJob) -> None:
        super().__init__()
        self._job = job

    def on_presence(self, news: Presence) -> None:
        """Report a stopped process at once, a running one only if it stays silent."""
        job, process = self._job, self._job.processes.find(news.rank)
        if news.state == "leaving" or job.departures.is_leaving(news.rank):
            return  # the lines about its host say it
        if news.state == "back":
            if not self.end(news.rank):
                job.show(job.event_log.presence(news))
        elif process is None or process.is_frozen():
            job.show(job.event_log.presence(news))
        else:
            self.begin(news.rank, time.monotonic())

    def report_stuck(self, now_s: float) -> None:
        """Report processes that run but have been silent for longer than a busy machine is."""
        job = self._job
        for rank, silent_s in self.newly_stuck(now_s):
            words = f"has sent no heartbeat for {silent_s:.0f} s, though its process runs"
            job.log(f"{job.event_log.name(rank)} {words}: it may be stuck")
            process = job.processes.find(rank)
            if process is not None:
                process.ask_for_stacks()
