"""What the simulation has found: every bug leaves the plan that showed it, and is tried first.

A plan is kept whole, not only its seed, because what is drawn from a seed changes with the
simulation. `python -m simulation --seed 65 --keep "what it was"` adds one, after shrinking it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from simulation.job import Plan

_PATH = Path(__file__).with_name("found.json")


class Found(msgspec.Struct, frozen=True):
    """A bug, in a line, and the plan that showed it."""

    what: str
    plan: Plan
    mutant: str = ""  # the mutant that has it still; empty: nobody has it any more


def found() -> list[Found]:
    """Return all that was found, oldest first."""
    return msgspec.json.decode(_PATH.read_bytes(), type=list[Found]) if _PATH.exists() else []


def keep(one: Found) -> None:
    """Add what was found."""
    lines = [msgspec.json.encode(each).decode() for each in (*found(), one)]
    _PATH.write_text("[\n" + ",\n".join(lines) + "\n]\n")
