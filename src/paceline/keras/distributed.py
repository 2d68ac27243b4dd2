"""paceline.keras.distribute: make a compiled Keras model train on all workers.

The class of the model's optimizer is swapped for a subclass with the same name and module. So the
optimizer stays the same object (schedules and callbacks keep their reference), and a saved model
names the plain class: it loads where there is no Paceline. Not a wrapper before `compile`, because
`compile` wraps the optimizer in a LossScaleOptimizer for mixed_float16. That one updates only if
all gradients are finite on this worker, and the workers would make different numbers of exchanges.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.keras.exchange import Exchange, TorchExchange, TwinExchange
from paceline.keras.fit import FitCallback
from paceline.keras.host import JaxHost, TensorFlowHost
from paceline.runtime.job import current

_MARK = "paceline_exchange"  # an attribute of the swapped class


def distribute(model: Any, pace: str = "allreduce", **options: Any) -> Any:
    """Train this compiled model on all workers of the job; return the same model. Collective.

    Call it once, after `compile`. Every worker starts with rank 0's weights. `fit` then averages
    gradients in each step and, at the end of an epoch, metrics and batch norm statistics. Workers
    with fewer batches take part with zeros until the epoch is over for all.

    pace, options   as for pl.distribute: "allreduce", "local:8", "ps", "async", "ssp:3" ...;
                    through servers the optimizer must be SGD, Adam, AdamW, RMSprop or Adagrad

    After another `compile`, call it again. Raises UsageError for a model that is not compiled, or
    is distributed already.

    >>> model.compile("adam", "mse")
    >>> model = paceline.keras.distribute(model, pace="local:8")
    """
    keras = require("keras")
    current()
    _require_compiled(keras, model)
    exchange = _make_exchange(keras, model, pace, options)
    swap_class(keras, model.optimizer, exchange)
    _watch_fit(model, exchange)
    if model.built and model.trainable_variables and not exchange.has_begun:
        exchange.begin()  # type: ignore[attr-defined]
    model.train_function = None  # an earlier fit may have compiled one without exchange
    return model


def exchange_of(optimizer: Any) -> Exchange | None:
    """Return what an optimizer exchanges with; None if it is plain."""
    inner = getattr(optimizer, "inner_optimizer", None)
    found: Exchange | None = getattr(type(optimizer), _MARK, None)
    return found or (exchange_of(inner) if inner is not None else None)


def _require_compiled(keras: Any, model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"paceline.keras.distribute: expected a keras.Model, got {type(model).__name__}; for"
            " torch modules use paceline.distribute"
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise UsageError(
            "paceline.keras.distribute: the model has no optimizer yet; call model.compile(...)"
            " before, and distribute(model) after it"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"paceline.keras.distribute: the optimizer is {type(optimizer).__name__}, expected one"
            " of keras.optimizers"
        )
    if exchange_of(optimizer) is not None:
        raise UsageError(
            "paceline.keras.distribute: this model's optimizer averages gradients already: it was"
            " distributed before, or wrapped before compile(); do one of the two"
        )


def _make_exchange(keras: Any, model: Any, pace: str, options: dict[str, Any]) -> Exchange:
    backend = keras.config.backend()
    if backend == "torch":
        if model.jit_compile is True:
            raise UsageError(
                "paceline.keras.distribute: the model was compiled with jit_compile=True, and"
                " torch.compile would leave out the exchange; use compile(..., jit_compile=False)"
            )
        older = getattr(vars(model).get("fit"), "exchange", None)
        if older is None or not older.has_begun:
            return TorchExchange(model, pace, options)
        older.renew(pace, options)
        return older  # type: ignore[no-any-return]
    if backend not in ("tensorflow", "jax"):
        raise UsageError(
            f"paceline.keras.distribute: KERAS_BACKEND is {backend}; expected tensorflow, torch or"
            " jax"
        )
    host = TensorFlowHost() if backend == "tensorflow" else JaxHost()
    problem = host.check(model)
    if problem is not None:
        raise UsageError(f"paceline.keras.distribute: {problem}")
    return TwinExchange(model, pace, options, host)


def swap_class(keras: Any, optimizer: Any, exchange: Any) -> None:
    """Let an optimizer call `exchange` in each step: it gets a class of the same name."""
    plain = type(optimizer)
    scales_losses = issubclass(plain, keras.optimizers.LossScaleOptimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        def update(grads: Any, variables: Any) -> None:
            plain.apply(self, grads, variables)

        exchange.apply(self, update, grads, trainable_variables)

    def stateless_apply(self: Any, state: Any, grads: Any, values: Any) -> Any:
        if not scales_losses:  # it calls apply()
            return plain.stateless_apply(self, state, grads, values)
        values, state = plain.stateless_apply(self, state, exchange.mean(grads), values)
        return exchange.after(values), state

    def scale_loss(self: Any, loss: Any) -> Any:
        exchange.before_backward()
        return plain.scale_loss(self, loss)

    def clip_gradients(self: Any, grads: Any) -> Any:
        if exchange.accumulates:
            grads = _mean_of_accumulated(self, exchange, grads)
        return plain._clip_gradients(self, grads)

    methods: dict[str, Callable[..., Any]] = {
        "apply": apply,
        "stateless_apply": stateless_apply,
        "_clip_gradients": clip_gradients,
    }
    if isinstance(exchange, TorchExchange):
        methods["scale_loss"] = scale_loss
    swapped = type(plain.__name__, (plain,), {**methods, _MARK: exchange})
    swapped.__module__, swapped.__qualname__ = plain.__module__, plain.__qualname__
    optimizer.__class__ = swapped


def _mean_of_accumulated(optimizer: Any, exchange: Any, grads: Sequence[Any]) -> list[Any]:
    """Average the sum of several batches: once, in the step that uses it."""
    keras = require("keras")
    if keras.config.backend() != "jax":  # Keras calls this in that step only
        means: list[Any] = exchange.mean(grads)
        return means
    jax = require("jax")
    is_due = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
    chosen: list[Any] = jax.lax.cond(is_due, exchange.mean, lambda own: own, list(grads))
    return chosen


def _watch_fit(model: Any, exchange: Any) -> None:
    """Add our callback to every `fit` of this model."""
    plain = type(model).fit
    signature = inspect.signature(plain)
    keras = require("keras")

    def fit(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(model, *arguments, **named)
        given = bound.arguments.get("callbacks")
        ours = FitCallback.make(keras, exchange)
        if isinstance(given, keras.callbacks.CallbackList):
            ours.set_model(model)
            given.callbacks.insert(0, ours)
        else:
            more = [] if given is None else given if isinstance(given, list | tuple) else [given]
            bound.arguments["callbacks"] = [ours, *more]
        exchange.error = None
        try:
            return plain(*bound.args, **bound.kwargs)
        except Exception as error:
            if exchange.error is None or exchange.error is error:
                raise
            raise exchange.error from error

    def make_train_function(*arguments: Any, **named: Any) -> Any:
        if exchange_of(model.optimizer) is not exchange:
            raise UsageError(
                "this model was compiled again after paceline.keras.distribute(model), and its new"
                " optimizer averages no gradients: call paceline.keras.distribute(model) once more"
            )
        return type(model).make_train_function(model, *arguments, **named)

    def build(iterator: Any = None, data_batch: Any = None) -> None:  # noqa: ARG001
        if iterator is not None and not model.trainable_variables:
            model._symbolic_build(iterator=iterator)

    if hasattr(type(model), "_maybe_symbolic_build"):
        # TensorFlow makes the weights in the first step. They have values only after it.
        object.__setattr__(model, "_maybe_symbolic_build", build)
    fit.__doc__ = plain.__doc__
    fit.exchange = exchange  # type: ignore[attr-defined]
    object.__setattr__(model, "fit", fit)
    object.__setattr__(model, "make_train_function", make_train_function)
