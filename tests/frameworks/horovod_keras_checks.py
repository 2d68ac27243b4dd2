"""Horovod's interface for Keras, on each backend; run by test_horovod_frameworks.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from environment import main
from keras_models import (
    assert_close,
    assert_same_everywhere,
    data,
    fit_alone,
    fit_mine,
    make,
    same_start,
)

import paceline.horovod.keras as hvd

BACKEND = keras.config.backend()


def _compiled(optimizer, **more) -> keras.Model:
    model = same_start(make(**more)) if hvd.rank() == 0 else make(**more)  # rank 0's weights count
    model.compile(optimizer, "mse")
    return model


def _start():
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def equals_one_process() -> None:
    """DistributedOptimizer before compile; half a batch on each rank is one batch of one."""
    for options, passes in (
        ({}, 1),
        ({"op": hvd.Sum}, 1),
        ({"gradient_predivide_factor": 2.0}, 1),
        ({"backward_passes_per_step": 2}, 2),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 2),
    ):
        rate = 0.02
        alone = same_start(make())
        sums = options.get("op") == hvd.Sum
        sums |= passes == 2 and "average_aggregated_gradients" not in options
        plain = keras.optimizers.SGD(rate * 2 if sums else rate)
        plain.gradient_accumulation_steps = passes if passes > 1 else None
        alone.compile(plain, "mse")
        fit_alone(alone)
        given = keras.optimizers.SGD(rate)
        optimizer = hvd.DistributedOptimizer(given, **options)
        assert type(optimizer).__name__ == "SGD" and isinstance(optimizer, keras.optimizers.SGD)
        model = _compiled(optimizer)
        history = fit_mine(model, callbacks=[_start(), hvd.callbacks.MetricAverageCallback()])
        assert_close(model, alone)
        assert_same_everywhere(model)
        losses = hvd.allgather_object([float(x) for x in history.history["loss"]])
        assert losses[0] == losses[1] and losses[0][1] < losses[0][0]


def half_and_adam() -> None:
    """Compression, an optimizer with state, and a checkpoint that only the root loads."""
    model = _compiled(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=hvd.Compression.fp16)
    )
    fit_mine(model, callbacks=[_start()])
    assert_same_everywhere(model)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.keras")
        model.save(path)
        plain = keras.saving.load_model(path)  # without Horovod's interface
        assert isinstance(plain.optimizer, keras.optimizers.Adam)
        assert not hasattr(plain.optimizer, "paceline_exchange")
        loaded = hvd.load_model(path)
    assert hasattr(loaded.optimizer, "paceline_exchange")
    assert_close(loaded, model, 0.0)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 16
    if hvd.rank() == 1:
        loaded.set_weights([w * 0 for w in loaded.get_weights()])
        for variable in loaded.optimizer.variables[2:]:
            variable.assign(variable * 0)
    fit_mine(loaded, callbacks=[_start()])
    assert_same_everywhere(loaded)


def uneven_steps() -> None:
    """A rank with fewer batches joins; validation in between."""
    x, y = data()
    rows = slice(0, 40) if hvd.rank() == 0 else slice(40, 60)
    model = _compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), norm=True)
    model.fit(
        x[rows],
        y[rows],
        batch_size=4,
        epochs=2,
        verbose=0,
        validation_data=(x[:8], y[:8]),
        callbacks=[hvd.callbacks.MetricAverageCallback(), _start()],
    )
    assert int(model.optimizer.iterations) == 20
    trainable = [float(keras.ops.sum(v)) for v in model.trainable_variables]
    everyone = hvd.allgather_object(trainable)
    assert everyone[0] == everyone[1]


def inf_on_one_worker() -> None:
    """mixed_float16: compile puts a LossScaleOptimizer around the distributed optimizer."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = same_start(make())
    finally:
        keras.config.set_dtype_policy(policy)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = data()
    before = [w.copy() for w in model.get_weights()]
    bad = x[:8] * (np.float32(np.inf) if hvd.rank() == 1 else np.float32(1))
    model.fit(bad, y[:8], batch_size=8, verbose=0, callbacks=[_start()])
    for one, two in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, two)
    assert float(model.optimizer.dynamic_scale) == model.optimizer.initial_scale / 2
    for _ in range(8):
        model.fit(x[:16], y[:16], batch_size=8, verbose=0, callbacks=[_start()])
    assert any(not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    assert_same_everywhere(model)


def learning_rates() -> None:
    """Warm-up and schedule, with the momentum that Horovod's correction has."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

    size = hvd.size()
    rate = 0.01 * size
    model = _compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.5)))
    history = fit_mine(
        model,
        epochs=4,
        callbacks=[
            _start(),
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(rate, 0.1, start_epoch=3),
            Watch(),
        ],
    )
    steps = len(seen) // 4
    warm = [((i + 1) / steps * (size - 1) / 2 + 1) / size * rate for i in range(2 * steps)]
    np.testing.assert_allclose(seen[: 2 * steps], warm, rtol=1e-5)
    np.testing.assert_allclose(seen[2 * steps : 3 * steps], rate, rtol=1e-5)
    np.testing.assert_allclose(seen[3 * steps :], rate * 0.1**3, rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], [seen[i] for i in (7, 15, 23, 31)][:4])
    # One variable with the gradient 1: v = m v - lr g, and m is multiplied by new / old once.
    one = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    one.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), _sum_loss)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch)
    before = float(one.get_weights()[0][0, 0])
    one.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=2, verbose=0, callbacks=[schedule])
    moved = before - float(one.get_weights()[0][0, 0])
    assert moved == pytest.approx(0.1 + (0.5 * 2.0 * 0.1 + 0.2), rel=1e-4)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.1)


def _sum_loss(_, predicted):
    return keras.ops.sum(predicted)


def values_and_refusals() -> None:
    me = hvd.rank()
    assert float(hvd.allreduce(me + 1.0)) == 1.5 and float(hvd.allreduce(me, op=hvd.Sum)) == 1
    assert hvd.allgather([me]).shape == (2,)
    assert float(hvd.broadcast(np.float32(me), root_rank=1, name="root")) == 1.0
    part = hvd.reducescatter(np.arange(2.0), op=hvd.Sum)
    assert float(keras.ops.convert_to_numpy(part)[0]) == 2.0 * me
    assert hvd.broadcast_object({"epoch": me}, root_rank=1) == {"epoch": 1}
    used = hvd.DistributedOptimizer(keras.optimizers.SGD())
    import paceline.keras as pk

    model = make()
    model.compile(used, "mse")
    for call, words in (
        (lambda: hvd.DistributedOptimizer("adam"), "'adam'"),
        (lambda: hvd.DistributedOptimizer(used), "distributed already"),
        (lambda: pk.distribute(model), "already"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum), "Adasum"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), compress="fp16"), "pace="),
        (lambda: hvd.broadcast_global_variables(0), "callback"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    if BACKEND != "jax":
        model = make()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=True)
        with pytest.raises(ValueError, match="jit_compile"):
            fit_mine(model, callbacks=[_start()])


def any_pace() -> None:
    """One argument more: local steps, with the callback that every script has."""
    with pytest.raises(ValueError, match="BroadcastGlobalVariablesCallback"):
        _without_callback()
    model = _compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), pace="local:2"))
    for _ in range(2):
        fit_mine(model, callbacks=[_start(), hvd.callbacks.MetricAverageCallback()])
    assert_same_everywhere(model)
    assert model.optimizer.paceline_exchange.switcher.steps == 32


def served() -> None:
    """The same with parameter servers."""
    model = _compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.02), pace="ssp:2"))
    losses = fit_mine(model, epochs=4, callbacks=[_start()]).history["loss"]
    assert losses[-1] < losses[0] / 2, losses


def _without_callback() -> None:
    model = _compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), pace="local:2"))
    fit_mine(model)


CHECKS = {
    check.__name__: check
    for check in (
        equals_one_process,
        half_and_adam,
        uneven_steps,
        inf_on_one_worker,
        learning_rates,
        values_and_refusals,
        any_pace,
        served,
    )
}

if __name__ == "__main__":
    hvd.init()
    main(CHECKS)
