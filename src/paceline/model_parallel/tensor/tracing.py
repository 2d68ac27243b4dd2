"""Tracing: find out which modules can be cut by running the model on a simulated axis.

Every linear layer and convolution that receives a whole tensor is tried as a COLUMN and returns a
cut tensor. A layer that receives a tensor cut along its input features is the ROW behind it; a
BatchNorm of cut channels is cut with them. If on the way an operation needs the whole tensor, the
column is refused, with that operation as the reason (or tried again as several blocks: q, k and v
in one matrix), and the model is run again, until nothing fails. What a column must not do is leave
the model, unless it is the output over a vocabulary. Nothing here communicates, so all processes
find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.model_parallel.tensor.attention import can_cut
from paceline.model_parallel.tensor.axis import Simulated
from paceline.model_parallel.tensor.dry_run import Calls, quiet
from paceline.model_parallel.tensor.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    Place,
    column,
    feature_dim,
    row,
)
from paceline.model_parallel.tensor.sharded_tensor import CutTensor, cuts_in
from paceline.model_parallel.tensor.styles import Style, cut_class, cut_dims, indivisible

BLOCKS = (1, 3, 2)  # tried in this order
VOCABULARY = 1024  # an output of at least so many features is one over a vocabulary


@dataclass
class Findings:
    """What tracing has found."""

    styles: dict[str, Style] = field(default_factory=dict)
    groups: list[frozenset[str]] = field(default_factory=list)  # cut together: columns and rows
    entrances: list[frozenset[str]] = field(default_factory=list)  # columns with the same input
    refused: dict[str, str] = field(default_factory=dict)  # why not
    called: set[str] = field(default_factory=set)


class Tracing:
    """Runs a model until its plan is settled."""

    def __init__(self, model: nn.Module, count: int, forced: Mapping[str, Style] | None) -> None:
        self._modules = {name: module for name, module in model.named_modules()}
        self._count, self._forced = count, forced
        self._owners: dict[int, set[str]] = {}
        inside = {n for n, m in self._modules.items() if isinstance(m, nn.MultiheadAttention)}
        for name, module in self._modules.items():
            owner = next((n for n in inside if name.startswith(f"{n}.")), name)
            for param in module.parameters(recurse=False):
                self._owners.setdefault(id(param), set()).add(owner)
        self._inside = inside
        self._no_column: dict[str, str] = {}
        self._banned: dict[str, str] = {}
        self._trial: dict[str, int] = {}  # index in the options of blocks
        self._reasons: dict[str, list[str]] = {}
        self._total = sum(p.numel() for p in model.parameters())
        rows = (m.num_embeddings for m in self._modules.values() if isinstance(m, nn.Embedding))
        self._vocabularies = set(rows)

    def settle(self, runs: list[tuple[nn.Module, tuple[Any, ...]]]) -> Findings:
        """Run the models of `runs` (modules of the model with arguments) until nothing fails."""
        findings = Findings()
        for module, args in runs:
            while True:
                run = Trial(self._count)
                called = self._play(module, args, run)
                if not self._refuse(run):
                    break
            findings.styles |= run.roles
            findings.called |= called
            findings.groups += run.groups
            findings.entrances += [frozenset(names) for _, names in run.inputs.values()]
        findings.refused = {**self._no_column, **self._banned}
        for name in findings.styles:
            findings.refused.pop(name, None)
        return findings

    # -- one run ----------------------------------------------------------------------------------

    def _play(self, module: nn.Module, args: tuple[Any, ...], run: Trial) -> set[str]:
        running: list[str] = []
        called: set[str] = set()

        def note(name: str) -> None:
            called.add(name)

        patches = {n: self._patched(n, m, run, running) for n, m in self._modules.items()}
        with quiet(module), Calls(self._modules, patches, note), torch.no_grad():
            with WeightsOutside(self._owners, running, run):
                output = module(*args)
            for cut in cuts_in(_as_tree(output)):
                run.leaving |= cut.origins
        self._judge(run)
        return called

    def _patched(
        self, name: str, module: nn.Module, run: Trial, running: list[str]
    ) -> Callable[..., Any] | None:
        """Return what the module does in this run; None: what it always does."""
        if any(name.startswith(f"{around}.") for around in self._inside):
            return None
        own = module.forward
        play: Callable[..., Any]
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)) and cut_class(module, "column"):
            play = self._weighted
        elif isinstance(module, BATCH_NORMS) and cut_class(module, "norm"):
            play = self._norm
        elif isinstance(module, nn.Embedding) and cut_class(module, "embedding"):
            play = self._lookup
        elif type(module) is nn.MultiheadAttention:
            play = self._attention
        else:
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            run.order.setdefault(name, len(run.order))
            try:
                if name in self._banned or (self._forced is not None and name not in self._forced):
                    return own(*args, **kwargs)
                return play(name, module, run, own, *args, **kwargs)
            finally:
                running.pop()

        return forward

    def _weighted(
        self, name: str, module: Any, run: Trial, own: Callable[..., Any], x: Tensor
    ) -> Any:
        axis, forced = run, (self._forced or {}).get(name)
        if isinstance(x, CutTensor) and x.cut_dim == feature_dim(module, x):
            if forced is not None and forced.word != "row":
                return own(x)
            run.play(name, Style("row", x.blocks), x.origins)
            weight = axis.slice(1, x.blocks).of(module.weight)
            return row(module, x, weight, module.bias, Place(axis, name, x.blocks))
        if isinstance(x, CutTensor):
            return own(x)
        if forced is not None and forced.word == "row":
            run.play(name, forced)
            return own(x)
        options = self._options(module, forced)
        if name in self._no_column or not options:
            if not options:
                size, words = indivisible(module, Style("column"), self._count) or (0, "")
                self._no_column[name] = f"{size} {words} do not divide by tp={self._count}"
            return own(x)
        blocks = options[self._trial.get(name, 0)]
        run.play(name, Style("column", blocks))
        run.inputs.setdefault(id(x), (x, set()))[1].add(name)
        one = axis.slice(0, blocks)
        bias = None if module.bias is None else one.of(module.bias)
        return column(module, x, one.of(module.weight), bias, Place(axis, name, blocks))

    def _options(self, module: Any, forced: Style | None) -> list[int]:
        blocks = BLOCKS if forced is None or forced.blocks == 1 else (forced.blocks,)
        return [b for b in blocks if not indivisible(module, Style("column", b), self._count)]

    def _norm(self, name: str, module: Any, run: Trial, own: Callable[..., Any], x: Tensor) -> Any:
        del module
        if not isinstance(x, CutTensor) or x.cut_dim != 1:
            return own(x)
        run.play(name, Style("norm", x.blocks), x.origins)
        return x.like(x.local.clone(), 1)

    def _lookup(
        self, name: str, module: Any, run: Trial, own: Callable[..., Any], x: Tensor
    ) -> Any:
        bad = indivisible(module, Style("embedding"), self._count)
        is_tied = len(self._owners[id(module.weight)]) > 1
        if bad is not None:
            self._banned[name] = f"{bad[0]} {bad[1]} do not divide by tp={self._count}"
        elif self._forced is None and not is_tied and module.weight.numel() * 100 < self._total:
            self._banned[name] = (
                "small: less than 1 % of the model, and it would cost an all-reduce"
            )
        else:
            run.play(name, Style("embedding"))
        return own(x)

    def _attention(
        self, name: str, module: Any, run: Trial, own: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        bad = indivisible(module, Style("attention"), self._count)
        if bad is not None:
            self._banned[name] = f"{bad[0]} {bad[1]} do not divide by tp={self._count}"
        elif not can_cut(module):
            self._banned[name] = "bias_k, bias_v and add_zero_attn are not cut"
        else:
            run.play(name, Style("attention"))
        return own(*args, **kwargs)

    # -- what follows from it ---------------------------------------------------------------------

    def _judge(self, run: Trial) -> None:
        """See which columns have led nowhere, and which parameters are cut in two ways."""
        behind = {o for group in run.groups if len(group) > 1 for o in group}
        for name, style in list(run.roles.items()):
            if style.word != "column":
                continue
            module = self._modules[name]
            if name in run.leaving:
                if name in behind:
                    run.failed.setdefault(name, "its output also leaves the model")
                elif self._is_vocabulary(name, module) and style.blocks == 1:
                    run.roles[name] = Style("vocabulary")
                else:
                    run.failed.setdefault(name, "its output leaves the model, and is small")
            elif name not in behind and not self._is_forced(name):
                run.failed.setdefault(name, "no layer behind it takes its output in pieces")
        for name in run.outside & run.roles.keys():
            run.banned[name] = "its weight is used by other code too"
        for owners in self._owners.values():
            cuts = {self._cut_of(name, run) for name in owners}
            if len(owners) > 1 and len(cuts) > 1:
                for name in owners & run.roles.keys():
                    others = ", ".join(sorted(owners - {name}))
                    run.banned.setdefault(name, f"its weight is also {others}'s, cut otherwise")

    def _is_forced(self, name: str) -> bool:
        return self._forced is not None and name in self._forced

    def _cut_of(self, name: str, run: Trial) -> tuple[int, int] | None:
        style = run.roles.get(name)
        if style is None or name in run.failed:
            return None
        return cut_dims(self._modules[name], style).get("weight")

    def _is_vocabulary(self, name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        size = module.out_features
        return size in self._vocabularies or size >= VOCABULARY or self._is_forced(name)

    def _refuse(self, run: Trial) -> bool:
        """Draw conclusions; True: run again.

        Behind a layer that was taken for a row of a refused column nothing is certain: only
        failures before the first such layer count.
        """
        doubtful = [
            run.order[name]
            for group in run.groups
            for name in group
            if group & run.failed.keys() and run.roles[name].word == "row"
        ]
        horizon = min(doubtful, default=len(run.order))
        self._banned |= run.banned
        for name, why in run.failed.items():
            if run.order[name] > horizon:
                continue
            reasons = self._reasons.setdefault(name, [])
            reasons.append(why)
            tried = self._trial[name] = self._trial.get(name, 0) + 1
            if tried >= len(self._options(self._modules[name], (self._forced or {}).get(name))):
                # The trial that got furthest has failed in its own way.
                self._no_column[name] = min(reasons, key=reasons.count)
        return bool(run.failed or run.banned)


def _as_tree(output: Any) -> Any:
    """Return the output as what can be searched: other libraries return objects."""
    return (
        vars(output) if hasattr(output, "__dict__") and not isinstance(output, Tensor) else output
    )


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
