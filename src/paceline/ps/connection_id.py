"""The name of the connection between a worker and a server, and whether the worker has called.

Between hosts a worker connects when it first needs the partition, which may be never. A server
that waited for it could not connect to the same worker for another partition meanwhile.
"""

from __future__ import annotations

from paceline.comm.fabric import Fabric, group_id_of
from paceline.comm.lazy_channels import POINT_TO_POINT
from paceline.control.member import Membership


def connection_id(partition: int, worker: int, server: int) -> int:
    """Return the id of the engine's group of a worker and a server."""
    return group_id_of(f"line {partition} {worker} {server}")


def has_called(
    fabric: Fabric, membership: Membership, partition: int, worker: int, server: int
) -> bool:
    """Return whether the server's end can be formed without waiting for the worker."""
    group_id = connection_id(partition, worker, server)
    generation = membership.primary_since(partition)
    return fabric.endpoint.has_called(
        membership.member(worker), group_id, generation, POINT_TO_POINT
    )
