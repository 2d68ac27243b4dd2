"""The line between a worker and the server that answers for a partition: a group of two.

Both ends form it alone, each when it comes to it: the engine's group is named after the partition
and the two processes, and is of the generation in which that server became the partition's primary,
so that a server that becomes it again later cannot take up an old line.

The server is the first member: on one host it never waits for a worker here, only workers for it.
"""

from __future__ import annotations

import math

from paceline.cluster.member import Membership
from paceline.collectives.fabric import Fabric
from paceline.collectives.group import Group

# A worker may have to wait for others as long as those take, so no operation has a deadline here;
# a server that is gone or stopped is noticed all the same.
PATIENCE_S = math.inf
SERVER, WORKER = 0, 1  # their ranks in the group


def form_line(
    fabric: Fabric, membership: Membership, partition: int, worker: int, server: int
) -> Group:
    """Form this process's end of a line. Blocks until the other end is there, on the worker."""
    for rank in (worker, server):
        fabric.link(membership.member(rank))
    return Group(
        fabric,
        (server, worker),
        PATIENCE_S,
        name=f"line {partition} {worker} {server}",
        generation=membership.primary_since(partition),
        membership=membership,
    )
