"""An object of the script as a part: `pl.carry(ema=ema)`, `pl.Checkpoint(..., ema=ema)`."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.state.protocol import Change, Part, State


class Carried(Part):
    """Has the state that `state_dict()` gives."""

    def __init__(self, name: str, thing: Any, caller: str = "carry") -> None:
        self.what = f"{caller}({name}=...)"
        lacking = [m for m in ("state_dict", "load_state_dict") if not hasattr(thing, m)]
        if lacking:
            raise UsageError(
                f"{self.what}: a {type(thing).__name__} has no {' and no '.join(lacking)}()"
            )
        self.thing = thing

    def state(self) -> State:
        return State(shared={"state": self.thing.state_dict()}, what=self.what)

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        self.thing.load_state_dict(state.shared["state"])
