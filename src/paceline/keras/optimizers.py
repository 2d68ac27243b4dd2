"""The optimizer of torch.optim that the servers run in the place of one of Keras.

Servers apply gradients themselves, with torch's optimizers. Those below compute what Keras' of the
same name computes, up to where epsilon is added: Keras adds it before the bias correction (Adam) or
under the root (RMSprop, Adagrad), torch after it. With momentum a change of the learning rate acts
on past gradients in torch, and only on new ones in Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.frameworks.requirement import require

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def _sgd(optimizer: Any) -> dict[str, Any]:
    return {"momentum": float(optimizer.momentum), "nesterov": bool(optimizer.nesterov)}


def _adam(optimizer: Any) -> dict[str, Any]:
    return {
        "betas": (float(optimizer.beta_1), float(optimizer.beta_2)),
        "eps": float(optimizer.epsilon),
        "amsgrad": bool(optimizer.amsgrad),
    }


def _adamw(optimizer: Any) -> dict[str, Any]:
    return {**_adam(optimizer), "weight_decay": float(optimizer.weight_decay)}


def _rmsprop(optimizer: Any) -> dict[str, Any]:
    return {
        "alpha": float(optimizer.rho),
        "momentum": float(optimizer.momentum),
        "eps": float(optimizer.epsilon),
        "centered": bool(optimizer.centered),
    }


def _adagrad(optimizer: Any) -> dict[str, Any]:
    return {
        "initial_accumulator_value": float(optimizer.initial_accumulator_value),
        "eps": float(optimizer.epsilon),
    }


_KNOWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
}


def server_optimizer(optimizer: Any, pace: str) -> Make:
    """Return what makes torch's optimizer for one of Keras; UsageError if servers have none."""
    keras = require("keras")
    name = next((n for n in ("AdamW", *_KNOWN) if isinstance(optimizer, _class(keras, n))), None)
    problem = _problem(keras, optimizer, name)
    if problem:
        raise UsageError(
            f"pace {pace}: {problem}; the servers run {', '.join(sorted(_KNOWN))} without these."
            " With pace allreduce or local every optimizer of Keras works"
        )
    assert name is not None
    settings, rate = _KNOWN[name](optimizer), float(optimizer.learning_rate)
    return lambda params: getattr(torch.optim, name)(params, lr=rate, **settings)


def _class(keras: Any, name: str) -> type:
    found: type = getattr(keras.optimizers, name)
    return found


def _problem(keras: Any, optimizer: Any, name: str | None) -> str:
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return (
            "the optimizer scales losses (mixed_float16), and servers do not know the scale; use"
            " the policy mixed_bfloat16"
        )
    if name is None:
        return f"the optimizer is {kind}"
    uses = [
        what
        for what in ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps")
        if getattr(optimizer, what, None)
    ]
    uses += ["use_ema"] if optimizer.use_ema else []
    uses += ["weight_decay"] if optimizer.weight_decay and name != "AdamW" else []
    return f"{kind} has {', '.join(uses)}" if uses else ""
