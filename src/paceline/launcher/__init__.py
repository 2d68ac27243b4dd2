"""Start, watch and stop the processes of a job.

    spec.py, roles.py       what to run, checked once
    local.py, host.py       a job on this host
    outcome.py, hang.py     why a job ended, why it hangs
    processes/              one process: start, output, signals, exit
    elastic/                jobs that continue when processes are lost, replaced and added
    function/               pl.launch: a function instead of a script

spec ----> local ----> host ----> spawner ----> template ----> the user's script, a server
             |           |-----> process table (each process, its output, its exit)
             |           \\-----> guard (ends what is left when the launcher is killed)
             \\-----> observe/display (the only writer to the terminal) <---- events

Start with local.py. Imports control/ and observe/; never torch.
"""
