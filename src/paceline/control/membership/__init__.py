"""Which processes are in the job: pure functions and values, without I/O and without a clock.

Start with roster.py, which decides. changes.py computes the next membership, departures.py who is
lost or leaves, adoption.py which generation members work in, partitions.py which server holds what,
numbers.py ranks and numbers of roles, leases.py which members are silent or lost.
"""
