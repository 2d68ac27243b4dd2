"""Jobs whose membership changes: processes are lost, replaced, added and taken away as they run.

plan.py         what was asked for, checked: --min, --max, --on-loss, --max-servers
job.py          the life of such a job; what it decides about ends and starts
coordination.py the coordinator as a child process that is restarted in place
template.py     a process that has imported torch and forks newcomers (template_program.py)
watch.py        signs that a process is stopped, or was killed for its memory
chronicle.py    every event as a line for people, and the closing summary
"""
