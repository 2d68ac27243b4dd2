"""This process in its job: `pl.init()`, configuration, the mesh, preemption, console output.

Start with job.py: `pl.init()` calls job_state.py, which connects to the coordinator (control/),
builds the engine (comm/) and holds what the process has of its job. elastic/ follows changes of the
membership.

config.py, launch_context.py, mesh.py, console.py, formatting.py, machine.py, work.py,
deprecation.py, batch_weight.py and preemption.py import nothing above them and may be used
everywhere. job.py and job_state.py may be imported from pace/ and above. server_main.py and
coordinator_main.py are the programs of servers and coordinators.
"""
