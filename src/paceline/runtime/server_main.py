"""The main program of a parameter server: `python -m paceline.runtime.server_main`, started by the
launcher."""

from __future__ import annotations

import sys

import torch

from paceline import _core
from paceline.errors import JobOver, TooLate, UsageError
from paceline.ps.server.optimizer import use_threads
from paceline.ps.server.process import ServerProcess
from paceline.runtime import job
from paceline.runtime.console import say


def main() -> int:
    """Serve the job that the environment names until its workers have left."""
    # The first optimizer of a process imports for seconds: do that before workers wait.
    torch.optim.SGD([torch.zeros(1)])
    mine = job.init()
    if mine.env.role != "server":
        raise UsageError("this process was not started as a server: use `paceline run -s 1 ...`")
    _core.keep_freed_memory()
    # The launcher's number of threads is for cache blocks of large updates; torch's own threads
    # would synchronise after every small operation, and spin there.
    use_threads(torch.get_num_threads())
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if mine.env.is_newcomer:
        try:
            mine.fabric.enter_generation(mine.rendezvous.agent.ready(mine.fabric.me))
        except TooLate as error:  # not a failure: there is nothing left to serve
            say(f"server {mine.env.number} is not needed: {error}")
            job.shutdown()
            return 0
    try:
        ServerProcess(mine.fabric, mine.env, mine.rendezvous.agent).run()
    except JobOver as error:  # the launcher reports why: Ctrl-C, or too few workers are left
        say(f"server {mine.env.number} ends: {error}")
    job.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
