"""One process of a job: how it starts, its output, its signals, its exit. Knows nothing of jobs.

    process.py         a process, its output pipes, its exit status
    table.py           the processes of a job by rank, and how each ended
    spawner.py         starts processes: forked from the template, or as fresh interpreters
    template.py        a template, from which processes are forked; template_main.py: its process
    imports_ahead.py   what a script imports first, in the template for replacements
    run_script.py      how a fork of a template runs a script
    forked_child.py    a forked process that is no rank: the coordinator, another template
    output.py          reads what a process prints
    monitor.py         what the kernel shows of a running process, and why it ended
    guard.py           ends what is left if the launcher is killed; guard_main.py: its process

Start with process.py and spawner.py. Imports nothing else of launcher/.
"""
