"""Who answers for a partition, and what a worker does when that changes. Pure.

The membership names the PRIMARY of every partition, and since which generation it is that; the pair
is a POST. A line belongs to one post. When a line breaks, its post is over for this worker: only
another membership can say who answers from then on, since a server that answered before the others
have agreed on it would be a second primary.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.control.member import Membership


@dataclass(frozen=True)
class Post:
    """One server in one partition's first place."""

    server: int  # rank
    since: int  # generation


@dataclass(frozen=True)
class Stay:
    """The line in use is the right one."""


@dataclass(frozen=True)
class Connect:
    """Form a line to this post, and send again what is unanswered."""

    post: Post


@dataclass(frozen=True)
class Wait:
    """Only a later membership can help."""


@dataclass(frozen=True)
class GiveUp:
    """No server has the partition any more."""


Course = Stay | Connect | Wait | GiveUp


def post_of(membership: Membership, partition: int) -> Post | None:
    """Return who answers for a partition; None when nobody holds it."""
    holders = membership.holders[partition]
    return Post(holders[0], membership.primary_since(partition)) if holders else None


def course(
    membership: Membership, partition: int, worker: int, used: Post | None, broken: Post | None
) -> Course:
    """Say what to do, given the newest membership.

    `used`: the post that this worker has a line to; `broken`: the last one whose line broke.
    """
    post = post_of(membership, partition)
    if post is None:
        return GiveUp()
    if post == used:
        return Stay()
    if post == broken or worker not in membership.ranks:  # it has not been let in yet
        return Wait()
    return Connect(post)
