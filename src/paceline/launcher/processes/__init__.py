"""One process of a job: how it starts, its output, its signals, its exit. Knows nothing of jobs.

    process.py         a process, its output pipes, its exit status
    table.py           the processes of a job by rank, and how each ended
    spawner.py         starts processes: forked from the template, or as fresh interpreters
    template_main.py   the template process; run_script.py: how a fork of it runs a script
    output.py          reads what a process prints
    monitor.py         what the kernel shows of a running process, and why it ended
    guard.py           ends what is left if the launcher is killed; guard_main.py: its process

Start with process.py and spawner.py. Imports nothing else of launcher/.
"""
