"""Start, watch and stop the processes of a job.

spec ----> local ----> process (one per rank) ----> the user's script
             |  \\----> guard (ends what is left when the launcher is killed)
             |-----> display (the only writer to the terminal) <---- board <---- events
             \\-----> report (what happened, first cause first)
"""
