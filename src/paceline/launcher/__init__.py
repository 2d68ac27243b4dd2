"""Start, watch and stop the processes of a job.

    spec.py, job_size.py       what to run, checked once
    job.py, host.py            a job on this host; the first failure ends it
    outcome.py, hang.py        how a job ended, why it hangs
    job_directory.py, job_registry.py, job_resources.py
                               what a running job keeps on disk, and how commands find it
    run_directory.py, run_configuration.py
                               the record of a run
    processes/                 one process: start, output, signals, exit
    elastic/                   jobs that continue when processes are lost, replaced and added
    function/                  pl.launch: a function instead of a script

spec ----> job ----> host ----> spawner ----> template ----> the user's script, a server
             |         |-----> process table (each process, its output, its exit)
             |         \\-----> guard (ends what is left if the launcher is killed)
             \\-----> observe/display (the only writer to the terminal) <---- events

Start with job.py. Imports control/ and observe/; never torch.
"""
