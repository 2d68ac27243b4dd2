"""Tracing: find out which modules can be sharded by running the model on a simulated axis.

Every linear layer and convolution that receives a full tensor is tried as a COLUMN and returns a
sharded tensor. A layer that receives a tensor sharded along its input features is its ROW; a
BatchNorm of sharded channels is sharded with them. If an operation in between needs the full
tensor, the column is refused, with that operation as the reason (or tried again as several blocks:
q, k and v in one matrix), and the model is run again, until nothing fails. A column's result must
not be the model's output, unless it is the output over a vocabulary. Nothing here communicates, so
all processes find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.model_parallel.dry_run import evaluation_dry_run
from paceline.model_parallel.tensor.axis import SimulatedAxis
from paceline.model_parallel.tensor.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    LayerSharding,
    can_shard,
    column,
    feature_dim,
    row,
)
from paceline.model_parallel.tensor.sharded_tensor import ShardedTensor, sharded_in, tree_of
from paceline.model_parallel.tensor.styles import Style, indivisible, shard_dims, sharded_class

BLOCKS = (1, 3, 2)  # tried in this order
VOCABULARY = 1024  # at least so many output features: an output over a vocabulary


@dataclass
class TraceResult:
    """What tracing has found."""

    styles: dict[str, Style] = field(default_factory=dict)
    groups: list[frozenset[str]] = field(default_factory=list)  # sharded together: columns and rows
    shared_inputs: list[frozenset[str]] = field(default_factory=list)  # columns with the same input
    refused: dict[str, str] = field(default_factory=dict)  # reasons
    called: set[str] = field(default_factory=set)


class PlanTracer:
    """Runs a model until a plan without failures is found."""

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
        self._not_columns: dict[str, str] = {}
        self._banned: dict[str, str] = {}
        self._blocks_tried: dict[str, int] = {}  # index in the options of blocks
        self._reasons: dict[str, list[str]] = {}
        self._total = sum(p.numel() for p in model.parameters())
        rows = (m.num_embeddings for m in self._modules.values() if isinstance(m, nn.Embedding))
        self._vocabularies = set(rows)

    def trace(self, runs: list[tuple[nn.Module, tuple[Any, ...]]]) -> TraceResult:
        """Run the models of `runs` (modules of the model with arguments) until nothing fails."""
        result = TraceResult()
        for module, args in runs:
            while True:
                run = TracingAxis(self._count)
                called = self._run_once(module, args, run)
                if not self._refuse_failed(run):
                    break
            result.styles |= run.roles
            result.called |= called
            result.groups += run.groups
            result.shared_inputs += [frozenset(names) for _, names in run.inputs.values()]
        result.refused = {**self._not_columns, **self._banned}
        for name in result.styles:
            result.refused.pop(name, None)
        return result

    # -- one run ----------------------------------------------------------------------------------

    def _run_once(self, module: nn.Module, args: tuple[Any, ...], run: TracingAxis) -> set[str]:
        running: list[str] = []
        called: set[str] = set()
        hooks = [
            one.register_forward_pre_hook(lambda *_, name=name: called.add(name))
            for name, one in self._modules.items()
        ]
        try:
            with evaluation_dry_run(module), torch.no_grad():  # which removes these forwards
                names = {id(one): name for name, one in self._modules.items()}
                for one in module.modules():
                    if patch := self._patched(names[id(one)], one, run, running):
                        one.forward = patch
                with OutsideWeightUse(self._owners, running, run):
                    output = module(*args)
                for sharded in sharded_in(tree_of(output)):
                    run.leaving |= sharded.origins
        finally:
            for hook in hooks:
                hook.remove()
        self._check_outcome(run)
        return called

    def _patched(
        self, name: str, module: nn.Module, run: TracingAxis, running: list[str]
    ) -> Callable[..., Any] | None:
        """Return the module's forward in this run; None: its own."""
        if any(name.startswith(f"{around}.") for around in self._inside):
            return None
        own = module.forward
        set_role: Callable[..., Any]
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)) and sharded_class(module, "column"):
            set_role = self._trace_weight
        elif isinstance(module, BATCH_NORMS) and sharded_class(module, "norm"):
            set_role = self._trace_norm
        elif isinstance(module, nn.Embedding) and sharded_class(module, "embedding"):
            set_role = self._trace_embedding
        elif type(module) is nn.MultiheadAttention:
            set_role = self._trace_attention
        else:
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            run.order.setdefault(name, len(run.order))
            try:
                if name in self._banned or (self._forced is not None and name not in self._forced):
                    return own(*args, **kwargs)
                return set_role(name, module, run, own, *args, **kwargs)
            finally:
                running.pop()

        return forward

    def _trace_weight(
        self, name: str, module: Any, run: TracingAxis, own: Callable[..., Any], x: Tensor
    ) -> Any:
        axis, forced = run, (self._forced or {}).get(name)
        if isinstance(x, ShardedTensor) and x.shard_dim == feature_dim(module, x):
            if forced is not None and forced.kind != "row":
                return own(x)
            run.set_role(name, Style("row", x.blocks), x.origins)
            weight = axis.slice(1, x.blocks).of(module.weight)
            return row(module, x, weight, module.bias, LayerSharding(axis, name, x.blocks))
        if isinstance(x, ShardedTensor):
            return own(x)
        if forced is not None and forced.kind == "row":
            run.set_role(name, forced)
            return own(x)
        options = self._options(module, forced)
        if name in self._not_columns or not options:
            if not options:
                size, what = indivisible(module, Style("column"), self._count) or (0, "")
                self._not_columns[name] = f"{size} {what} do not divide by tp={self._count}"
            return own(x)
        blocks = options[self._blocks_tried.get(name, 0)]
        run.set_role(name, Style("column", blocks))
        run.inputs.setdefault(id(x), (x, set()))[1].add(name)
        one = axis.slice(0, blocks)
        bias = None if module.bias is None else one.of(module.bias)
        return column(module, x, one.of(module.weight), bias, LayerSharding(axis, name, blocks))

    def _options(self, module: Any, forced: Style | None) -> list[int]:
        blocks = BLOCKS if forced is None or forced.blocks == 1 else (forced.blocks,)
        return [b for b in blocks if not indivisible(module, Style("column", b), self._count)]

    def _trace_norm(
        self, name: str, module: Any, run: TracingAxis, own: Callable[..., Any], x: Tensor
    ) -> Any:
        del module
        if not isinstance(x, ShardedTensor) or x.shard_dim != 1:
            return own(x)
        run.set_role(name, Style("norm", x.blocks), x.origins)
        return x.like(x.local.clone(), 1)

    def _trace_embedding(
        self, name: str, module: Any, run: TracingAxis, own: Callable[..., Any], x: Tensor
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
            run.set_role(name, Style("embedding"))
        return own(x)

    def _trace_attention(
        self,
        name: str,
        module: Any,
        run: TracingAxis,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        bad = indivisible(module, Style("attention"), self._count)
        if bad is not None:
            self._banned[name] = f"{bad[0]} {bad[1]} do not divide by tp={self._count}"
        elif not can_shard(module):
            self._banned[name] = "bias_k, bias_v and add_zero_attn cannot be sharded"
        else:
            run.set_role(name, Style("attention"))
        return own(*args, **kwargs)

    # -- the outcome of a run ---------------------------------------------------------------------

    def _check_outcome(self, run: TracingAxis) -> None:
        """Find columns without rows, and parameters that would be sharded in two ways."""
        with_rows = {o for group in run.groups if len(group) > 1 for o in group}
        for name, style in list(run.roles.items()):
            if style.kind != "column":
                continue
            module = self._modules[name]
            if name in run.leaving:
                if name in with_rows:
                    run.failed.setdefault(name, "its output is also the model's output")
                elif self._is_vocabulary(name, module) and style.blocks == 1:
                    run.roles[name] = Style("vocabulary")
                else:
                    run.failed.setdefault(name, "its output leaves the model, and is small")
            elif name not in with_rows and not self._is_forced(name):
                run.failed.setdefault(name, "no later layer takes its output sharded")
        for name in run.outside & run.roles.keys():
            run.banned[name] = "its weight is used by other code too"
        for owners in self._owners.values():
            dims = {self._dims_of(name, run) for name in owners}
            if len(owners) > 1 and len(dims) > 1:
                for name in owners & run.roles.keys():
                    others = ", ".join(sorted(owners - {name}))
                    run.banned.setdefault(
                        name, f"its weight is also {others}'s, sharded differently"
                    )

    def _is_forced(self, name: str) -> bool:
        return self._forced is not None and name in self._forced

    def _dims_of(self, name: str, run: TracingAxis) -> tuple[int, int] | None:
        style = run.roles.get(name)
        if style is None or name in run.failed:
            return None
        return shard_dims(self._modules[name], style).get("weight")

    def _is_vocabulary(self, name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        size = module.out_features
        return size in self._vocabularies or size >= VOCABULARY or self._is_forced(name)

    def _refuse_failed(self, run: TracingAxis) -> bool:
        """Refuse the columns that failed; return whether to run again.

        After a layer that was taken for a row of a refused column nothing is certain: only failures
        before the first such layer count.
        """
        doubtful = [
            run.order[name]
            for group in run.groups
            for name in group
            if group & run.failed.keys() and run.roles[name].kind == "row"
        ]
        horizon = min(doubtful, default=len(run.order))
        self._banned |= run.banned
        for name, why in run.failed.items():
            if run.order[name] > horizon:
                continue
            reasons = self._reasons.setdefault(name, [])
            reasons.append(why)
            tried = self._blocks_tried[name] = self._blocks_tried.get(name, 0) + 1
            if tried >= len(self._options(self._modules[name], (self._forced or {}).get(name))):
                # The attempt that got furthest has a reason of its own.
                self._not_columns[name] = min(reasons, key=reasons.count)
        return bool(run.failed or run.banned)


class TracingAxis(SimulatedAxis):
    """The simulated axis of one run, and what is found on it."""

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

    def may_combine(self, one: frozenset[str], other: frozenset[str]) -> bool:
        # Gates have the same input; with different inputs it is a residual stream, which costs less
        # if it is full.
        def inputs(origins: frozenset[str]) -> set[int]:
            return {key for key, (_, names) in self.inputs.items() if names & origins}

        return one == other or bool(inputs(one) & inputs(other))

    def on_loss(self, origins: frozenset[str]) -> None:
        self.leaving |= origins

    def set_role(self, name: str, style: Style, origins: Iterable[str] = ()) -> None:
        """Note the role of a module in this call."""
        known = self.roles.setdefault(name, style)
        if known != style:
            self.banned[name] = f"it is called several times, as {known} and as {style}"
        self.groups.append(frozenset([name, *origins]))


_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")}


class OutsideWeightUse(TorchFunctionMode):
    """Notices parameters that code other than their module's forward uses."""

    def __init__(self, owners: dict[int, set[str]], running: list[str], run: TracingAxis) -> None:
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
                        self._note_use(one)
        return func(*args, **(kwargs or {}))

    def _note_use(self, param: nn.Parameter) -> None:
        owners = self._owners.get(id(param), set())
        if not owners & set(self._running):
            self._run.outside |= owners
