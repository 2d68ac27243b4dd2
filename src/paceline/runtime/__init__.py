"""This process in its job: `pl.init()`, configuration, the mesh, preemption, console output.

Start with job.py: `pl.init()` calls join.py, which connects to the coordinator (control/) and
builds the engine (comm/). job_state.py holds what the process has of its job. elastic/ follows
changes of the membership.

config.py, launch_context.py, mesh.py, console.py, formatting.py, machine.py, work.py,
batch_weight.py and preemption.py import nothing above them and may be used everywhere. job.py,
join.py and job_state.py may be imported from pace/ and above. server_main.py and
coordinator_main.py are the programs of servers and coordinators.
"""
