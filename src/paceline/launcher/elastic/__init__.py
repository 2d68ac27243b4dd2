"""Jobs whose membership changes: processes are lost, replaced, added and removed while they run.

    job.py                  the job: starts and watches processes, follows the coordinator
    loss_policy.py          what the exit of a process means, and what follows
    replacements.py         starts processes for open slots
    host_requests.py        carries out `paceline hosts`
    coordinator_process.py  the coordinator: its process, restarted in place, and requests to it
    event_log.py            every event as a line, and the closing summary

Start with job.py. The worker's side of the same changes is runtime/elastic.
"""
