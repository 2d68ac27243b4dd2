"""One trial: a run of a model on a simulated axis, and what is noticed in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.model_parallel.tensor.axis import Simulated
from paceline.model_parallel.tensor.styles import Style


class Trial(Simulated):
    """The axis that the modules of the run cross, and what it hears."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.roles: dict[str, Style] = {}
        self.order: dict[str, int] = {}  # of the first call
        self.groups: list[frozenset[str]] = []
        self.inputs: dict[int, tuple[Tensor, set[str]]] = {}
        self.failed: dict[str, str] = {}  # as columns
        self.banned: dict[str, str] = {}  # altogether
        self.leaving: set[str] = set()
        self.outside: set[str] = set()  # weights that other code uses

    def on_gather(self, origins: frozenset[str], why: str) -> None:
        for origin in origins:
            self.failed.setdefault(origin, why)

    def may_meet(self, one: frozenset[str], other: frozenset[str]) -> bool:
        # Gates have the same input; with different ones it is a stream of residuals, which costs
        # less if it is whole.
        def inputs(origins: frozenset[str]) -> set[int]:
            return {key for key, (_, names) in self.inputs.items() if names & origins}

        return one == other or bool(inputs(one) & inputs(other))

    def on_loss(self, origins: frozenset[str]) -> None:
        self.leaving |= origins

    def play(self, name: str, style: Style, origins: Iterable[str] = ()) -> None:
        """Note the role of a module in this call."""
        known = self.roles.setdefault(name, style)
        if known != style:
            self.banned[name] = f"it is called several times, as {known} and as {style}"
        self.groups.append(frozenset([name, *origins]))


_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")}


class WeightsOutside(TorchFunctionMode):
    """Notices parameters that are used by other code than their module's forward."""

    def __init__(self, owners: dict[int, set[str]], running: list[str], run: Trial) -> None:
        super().__init__()
        self._owners, self._running, self._run = owners, running, run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if getattr(func, "__name__", "") != "__get__" or func in _VIEWS:
            for arg in (*args, *(kwargs or {}).values()):
                for one in arg if isinstance(arg, (tuple, list)) else (arg,):
                    if isinstance(one, nn.Parameter):
                        self._see(one)
        return func(*args, **(kwargs or {}))

    def _see(self, param: nn.Parameter) -> None:
        owners = self._owners.get(id(param), set())
        if not owners & set(self._running):
            self._run.outside |= owners
