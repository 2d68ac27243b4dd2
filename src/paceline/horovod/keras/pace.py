"""DistributedOptimizer(pace=...): a Keras optimizer at one of Paceline's paces.

A pace needs the model with its weights. BroadcastGlobalVariablesCallback knows it: when fit()
begins, the callback gives the model to `paceline.keras.distribute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.keras.distributed import distribute, exchange_of
from paceline.keras.fit import FitCallback

_WISH = "paceline_pace"  # an attribute of the swapped class


def wish_pace(optimizer: Any, pace: str, options: Mapping[str, Any]) -> Any:
    """Note the pace of an optimizer; steps before it is known are refused."""
    plain = type(optimizer)

    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(
            f"DistributedOptimizer(pace={pace!r}) needs the model before its first step: train with"
            " fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])"
        )

    methods = {"apply": refuse, "stateless_apply": refuse, _WISH: (pace, dict(options))}
    wishing = type(plain.__name__, (plain,), methods)
    wishing.__module__, wishing.__qualname__ = plain.__module__, plain.__qualname__
    optimizer.__class__ = wishing
    return optimizer


def fulfil_wish(model: Any) -> Any:
    """Distribute a model whose optimizer has a pace; return what the running fit() needs: a
    callback, or None."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    wish = getattr(type(optimizer), _WISH, None)
    if wish is None:
        return None
    optimizer.__class__ = type(optimizer).__mro__[1]
    pace, options = wish
    train_function = model.train_function  # fit() has made it, and not traced it yet
    distribute(model, pace=pace, **options)
    model.train_function = train_function
    callback = FitCallback.make(require("keras"), exchange_of(model.optimizer))  # type: ignore[arg-type]
    callback.set_model(model)
    return callback
