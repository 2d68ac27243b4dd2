"""Jobs whose membership changes: processes are lost, replaced, added and taken away as they run.

plan.py          what was asked for, checked: --min, --max, --on-loss, --max-servers
job.py           what the end of a process means, and what follows from the coordinator's news
supervision.py   starting and looking at processes, filling empty places; the coordinator
control.py       the coordinator: its process, restarted in place, and what is said to it
watch.py         signs that a process is stopped, stuck, or was killed for its memory
chronicle.py     every event as a line for people, and the closing summary
facts.py         what is written down so that commands find a job
keeper.py        detached jobs, and how another keeper takes over
"""
