"""Jobs whose membership changes: processes are lost, replaced, added and removed while they run.

    job.py                  what the exit of a process means, and what follows
    supervision.py          starts processes, fills open places, runs the coordinator
    coordinator_process.py  the coordinator: its process, restarted in place, and requests to it
    bounds.py               --min, --max, --on-loss, --max-servers, checked
    event_log.py            every event as a line, and the closing summary
    job_facts.py            what is written down so that commands find a job
    supervisor.py           detached jobs, and how another supervisor takes over

Start with job.py. The worker's side of the same changes is runtime/elastic.
"""
