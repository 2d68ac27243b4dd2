"""`paceline.lightning`: train a LightningModule on all workers, at any pace.

    import paceline.lightning                                    # registers strategy="paceline"
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="paceline")
    trainer = lightning.Trainer(..., strategy=PacelineStrategy(pace="local:8"))

Lightning is told by `paceline run`, torchrun or Lightning's own launcher which process it is. The
module is given to pl.distribute instead of DistributedDataParallel, so every pace of pl.distribute
works. Metrics and barriers go through torch.distributed with backend "paceline". Lightning has no
entry point for strategies, so one import is needed. Importing this imports Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.data_parallel.distribute import begin
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.runtime.job import init

require("lightning")

from lightning.pytorch.strategies import (  # noqa: E402  # after the check of its version
    DDPStrategy,
    StrategyRegistry,
)

__all__ = ["PacelineStrategy"]


class PacelineStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's strategy for several processes, with pl.distribute in the place of DDP.

    `pace` and `options` are those of pl.distribute. Other keywords of DDPStrategy that concern
    processes (`cluster_environment`, `timeout`, `start_method` ...) are passed on.
    """

    strategy_name = "paceline"

    def __init__(
        self, pace: str = "allreduce", options: dict[str, Any] | None = None, **named: Any
    ) -> None:
        super().__init__(**{"process_group_backend": "paceline", **named})
        self._pace, self._options = pace, dict(options or {})
        self._switcher: PaceSwitcher | None = None

    def configure_ddp(self) -> None:
        """Leave the module as it is: it is distributed when its optimizer is known."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizer and distribute the module with it. Collective."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise UsageError(
                f"PacelineStrategy: {type(self.lightning_module).__name__}.configure_optimizers"
                f" returned {len(self.optimizers)} optimizers, expected one; for several use"
                ' DDPStrategy(process_group_backend="paceline")'
            )
        if self._switcher is None:
            [optimizer] = self.optimizers
            module = self.lightning_module
            self._switcher = begin(init(), module, optimizer, self._pace, self._options)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's step, with the newest parameters."""
        if self._switcher is not None:  # a module may compute without calling itself
            self._switcher.before_forward()
            self._switcher.settle()
        return super().training_step(*arguments, **named)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any
    ) -> Any:
        """Compute gradients, then step: the exchange lies between the two."""
        module = model or self.lightning_module
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)
        optimizer.step(**named)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchange."""
        assert self._switcher is not None, "called while training"
        with self._switcher.no_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a metric over all workers; means of whole numbers are truncated, as NCCL does."""
        is_whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if not is_whole or str(reduce_op).lower() not in ("mean", "avg"):
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        size = torch.distributed.get_world_size(group)
        return total.copy_(torch.div(total, size, rounding_mode="trunc"))

    def teardown(self) -> None:
        """Wait for values that are on their way, and let Lightning end."""
        if self._switcher is not None:
            self._switcher.settle()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            "paceline", cls, description="pl.distribute at pace allreduce, on all workers"
        )


if "paceline" not in StrategyRegistry:
    PacelineStrategy.register_strategies(StrategyRegistry)
