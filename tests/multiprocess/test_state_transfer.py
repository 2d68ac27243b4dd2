"""What a peer receives of a State."""

from __future__ import annotations

import torch

from paceline.comm.group import Group
from paceline.state import transfer
from paceline.state.protocol import State
from support import run_ranks


def carry(group: Group) -> dict[str, object]:
    """Send from the first to the second worker; return what has come there."""
    if group.rank == 0:
        every = State(
            counts=[3, {"a": [1]}],
            shared={"begin": torch.arange(3.0), "settings": [{"betas": (0.9, 0.99)}]},
            copied={"basis": torch.eye(2, dtype=torch.float64)},
            own={"residual": torch.ones(1)},
            passing={"clocks": [7], "nothing": torch.zeros(0)},
            served={"momentum": lambda: torch.ones(1)},
        )
        transfer.send(group, [1], {"pace": every, "empty": State()}, 5)
        return {}
    states, result = transfer.receive(group, 0)
    found = states["pace"]
    assert torch.equal(found.shared["begin"], torch.arange(3.0))
    assert torch.equal(found.copied["basis"], torch.eye(2, dtype=torch.float64))
    assert found.passing["nothing"].shape == (0,)
    return {
        "counts": found.counts,
        "betas": list(found.shared["settings"][0]["betas"]),
        "clocks": found.passing["clocks"],
        "others": [*found.own, *found.served, *states["empty"].shared],
        "result": result,
    }


def test_a_peer_receives_what_is_for_it_and_nothing_else() -> None:
    assert run_ranks(2, carry)[1] == {
        "counts": [3, {"a": [1]}],
        "betas": [0.9, 0.99],
        "clocks": [7],
        "others": [],
        "result": 5,
    }
