"""Engines: which hosts there are, and how an agent gets onto a host.

    engine.py           what an engine is
    ssh.py              hosts of --hosts; agents by the system's ssh
    ssh_failures.py     what ssh's errors mean, and what to do
    agent_command.py    the command that starts an agent, the same for all engines

Everything else (ranks, placement, supervision, display) is the same for all engines. A new engine
is one file beside ssh.py.
"""
