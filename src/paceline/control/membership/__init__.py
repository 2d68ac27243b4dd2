"""Which processes are in the job: pure functions and values, without I/O and without a clock.

Start with roster.py, which decides. changes.py computes the next membership, lifecycle.py tracks
which members join, enter a generation or depart, partitions.py assigns partitions to servers,
leases.py finds silent and lost members. state.py has what is journaled, and the numbers of roles;
policy.py what the user decided.
"""
