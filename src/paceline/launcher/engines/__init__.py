"""Engines: which hosts there are, and how an agent gets onto a host.

    engine.py           what an engine is
    ssh.py              hosts of --hosts; agents by the system's ssh
    ssh_failures.py     what ssh's errors mean, and what to do
    slurm.py            hosts of an allocation (slurm_allocation.py); agents by srun
    kubernetes/         hosts are pods; agents by the programs that wait in them
    ray/                nodes that Ray chooses; agents by Ray's actors
    agent_command.py    the command that starts an agent, the same for all engines
    sync.py             --sync: a copy of the project on each host; project_files.py: of which files

Everything else (ranks, placement, supervision, display) is the same for all engines. A new engine
is one file beside ssh.py.
"""
