"""The coordinator: the one process that knows the members of the job.

Start with coordinator.py. It asks membership/ what to decide, writes the decision to the journal,
and sends it to the members. operator_service.py answers launchers and commands; store.py and
work_pools.py hold what members share.
"""
