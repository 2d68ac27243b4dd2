"""Start, watch and stop the processes of a job.

spec ----> local ----> host ----> spawner ----> template ----> the user's script, serve
             |           |-----> crew (one process per rank or server, its output, its end)
             |           \\-----> guard (ends what is left when the launcher is killed)
             |-----> display (the only writer to the terminal) <---- board <---- events
             \\-----> report (what happened, first cause first)

function (pl.launch) ----> forked (one per rank or server) ----> the caller's function, serve
"""
