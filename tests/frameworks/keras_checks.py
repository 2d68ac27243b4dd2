"""What a Keras model does when it is distributed, on each backend; run by test_keras.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
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

import paceline as pl
import paceline.keras as pk
from paceline.errors import UsageError


def refused(call, *words: str) -> None:
    try:
        call()
    except UsageError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError(f"not refused; expected an error about {words}")


def equals_one_process() -> None:
    """Two workers with half a batch each compute what one computes with a batch."""
    for optimizer in (keras.optimizers.SGD(0.05, momentum=0.9), "adam"):
        config = optimizer if isinstance(optimizer, str) else optimizer.get_config()
        alone = same_start(make())
        alone.compile(
            optimizer if isinstance(optimizer, str) else keras.optimizers.SGD.from_config(config),
            "mse",
        )
        fit_alone(alone)
        model = same_start(make()) if pl.rank() == 0 else make()  # rank 0's weights count
        model.compile(optimizer, "mse")
        assert pk.distribute(model) is model
        history = fit_mine(model)
        assert_close(model, alone)
        assert_same_everywhere(model)
        assert history.history["loss"][1] < history.history["loss"][0]


def large_layers() -> None:
    """Layers so large that torch computes their gradients in engine memory; one is used twice."""

    def wide() -> keras.Model:
        shared, inputs = keras.layers.Dense(256, "relu", name="shared"), keras.Input((12,))
        hidden = shared(shared(keras.layers.Dense(256, "relu")(inputs)))
        linear = keras.layers.Dense(300, use_bias=False, name="linear")(hidden)
        model = same_start(keras.Model(inputs, keras.layers.Dense(1, name="last")(linear)))
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        return model

    alone, model = wide(), wide()
    fit_alone(alone, epochs=1)
    pk.distribute(model)
    before = model.predict(data()[0], verbose=0)
    fit_mine(model, epochs=1)
    assert_close(model, alone, 1e-4)
    assert_same_everywhere(model)
    assert np.abs(model.predict(data()[0], verbose=0) - before).max() > 0
    copy = keras.models.clone_model(model)
    copy.compile("sgd", "mse")
    copy.fit(*data(), verbose=0)  # of this worker alone
    is_torch = keras.config.backend() == "torch"
    for name, is_large in (("shared", True), ("linear", True), ("last", False)):
        assert ("call" in vars(model.get_layer(name))) == (is_large and is_torch), name
        assert "call" not in vars(copy.get_layer(name))
    if is_torch:  # the one that is used once: nothing was copied to its bucket
        kernel = model.get_layer("linear").kernel.value
        reducer = model.optimizer.paceline_exchange.switcher.training.reducer
        [slot] = [s for bucket in reducer.buckets for s in bucket.slots if s.param is kernel]
        seen: list[int] = []
        kernel.register_post_accumulate_grad_hook(lambda _: seen.append(slot.claimed))
        fit_mine(model, epochs=1)
        assert seen and all(seen)


def bad_calls() -> None:
    model = make()
    refused(lambda: pk.distribute(model), "compile")
    refused(lambda: pk.distribute("model"), "keras.Model")
    model.compile("sgd", "mse")
    pk.distribute(model)
    refused(lambda: pk.distribute(model), "already")
    other = make()
    other.compile(model.optimizer, "mse")  # its optimizer was distributed before compile
    refused(lambda: pk.distribute(other), "already")
    if keras.config.backend() != "jax":
        compiled = make()
        compiled.compile("sgd", "mse", jit_compile=True)
        refused(lambda: pk.distribute(compiled), "jit_compile")
    served = make()
    served.compile("sgd", "mse")
    refused(lambda: pk.distribute(served, pace="no-such-pace"), "no-such-pace")


def uneven_data() -> None:
    """A worker with fewer batches takes part until all are done; validation in between."""
    x, y = data()
    rows = slice(0, 40) if pl.rank() == 0 else slice(40, 60)
    model = make(norm=True)
    model.compile("sgd", "mse")
    pk.distribute(model)
    history = model.fit(
        x[rows], y[rows], batch_size=4, epochs=2, verbose=0, validation_data=(x[:8], y[:8])
    )
    assert_same_everywhere(model)  # with the statistics of batch norm
    exchange = model.optimizer.paceline_exchange
    assert exchange.switcher.steps == 20  # of the worker with more data
    losses = pl.world().all_gather(np.array(history.history["loss"]))
    np.testing.assert_array_equal(losses[0], losses[1])  # metrics are averaged


def accumulation() -> None:
    """Gradients of several batches are exchanged once."""
    alone = same_start(make())
    alone.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), "mse")
    fit_alone(alone)
    model = same_start(make())
    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), "mse")
    pk.distribute(model)
    fit_mine(model)
    assert_close(model, alone)
    assert model.optimizer.paceline_exchange.switcher.steps == 4  # 16 batches


def uneven_accumulation() -> None:
    x, y = data()
    size = 16 if pl.rank() == 0 else 32
    model = make()
    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), "mse")
    pk.distribute(model)
    refused(lambda: model.fit(x[:size], y[:size], batch_size=8, verbose=0), "steps_per_epoch")


def inf_on_one_worker() -> None:
    """With mixed_float16 an inf on one worker skips the step on all, and the job continues."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = same_start(make())
    finally:
        keras.config.set_dtype_policy(policy)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    pk.distribute(model)
    x, y = data()
    before = [w.copy() for w in model.get_weights()]
    bad = x[:8] * (np.float32(np.inf) if pl.rank() == 1 else np.float32(1))
    model.fit(bad, y[:8], batch_size=8, verbose=0)
    for one, two in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, two)
    assert float(model.optimizer.dynamic_scale) == model.optimizer.initial_scale / 2
    for _ in range(8):  # until the scale is small enough for float16
        model.fit(x[:16], y[:16], batch_size=8, verbose=0)
    assert any(not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    assert_same_everywhere(model)


def local_pace() -> None:
    """Workers step alone, and average their weights after every second step."""
    x, y = data()
    halves = [(x[:32], y[:32]), (x[32:], y[32:])]
    ways = []
    for _ in halves:
        ways.append(same_start(make()))
        ways[-1].compile(keras.optimizers.SGD(0.05), "mse")
    for first in range(0, 32, 16):
        for model, part in zip(ways, halves, strict=True):
            rows = slice(first, first + 16)
            model.fit(part[0][rows], part[1][rows], batch_size=8, shuffle=False, verbose=0)
        pairs = zip(*(model.get_weights() for model in ways), strict=True)
        means = [(a + b) / 2 for a, b in pairs]
        for model in ways:
            model.set_weights(means)
    model = same_start(make())
    model.compile(keras.optimizers.SGD(0.05), "mse")
    pk.distribute(model, pace="local:2")
    model.fit(*halves[pl.rank()], batch_size=8, shuffle=False, verbose=0)
    assert_close(model, ways[0])
    assert_same_everywhere(model)


def saved_model() -> None:
    """A saved model names plain classes, and trains on."""
    model = make()
    model.compile("adam", "mse")
    plain = type(model.optimizer)
    pk.distribute(model)
    fit_mine(model, epochs=1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
    assert not hasattr(loaded.optimizer, "paceline_exchange")
    assert type(loaded.optimizer) is plain
    assert_close(loaded, model, 0.0)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 8
    loaded.fit(*data(), verbose=0)


def compiled_again() -> None:
    """After another compile a model must be distributed again; it then trains as before."""
    alone, model = ways = [same_start(make()), same_start(make())]
    for one in ways:
        one.layers[0].trainable = False
        one.compile(keras.optimizers.SGD(0.05), "mse")
    pk.distribute(model)
    fit_alone(alone, epochs=1)
    fit_mine(model, epochs=1)
    for one in ways:
        one.layers[0].trainable = True
        one.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = data()
    refused(lambda: fit_mine(model, epochs=1), "once more")
    refused(lambda: model.train_on_batch(x[:8], y[:8]), "once more")
    pk.distribute(model)
    fit_alone(alone, epochs=1)
    fit_mine(model, epochs=1)
    assert_close(model, alone)
    assert_same_everywhere(model)


def without_weights() -> None:
    """A model that has no weights before its first step begins with that step."""
    keras.utils.set_random_seed(pl.rank())
    model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pk.distribute(model)
    fit_mine(model, epochs=1)
    assert_same_everywhere(model)


def callbacks() -> None:
    """One worker that stops ends all; warm-up raises the rate; rank 0 alone writes."""
    seen: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

        def on_train_batch_end(self, batch, logs=None):
            if pl.rank() == 1 and len(seen) == 2 and batch == 3:
                self.model.stop_training = True

    model = make(dropout=True)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    pk.distribute(model)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "best.keras")
        saving = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)
        fit_mine(
            model,
            epochs=6,
            callbacks=[
                pk.callbacks.LearningRateWarmup(0.01, epochs=2),
                pk.callbacks.OnRankZero(saving),
                Watch(),
            ],
        )
        assert path.exists() == (pl.rank() == 0)
    assert len(seen) == 3, seen  # worker 1 stopped in its third epoch, and so did worker 0
    assert seen[0] < seen[1] <= seen[2] and abs(seen[2] - 0.02) < 1e-6, seen
    assert_same_everywhere(model)


def sharded_data() -> None:
    import tensorflow as tf
    import torch

    x, y = data()
    part_x, part_y = pk.shard(x, y)
    np.testing.assert_array_equal(part_x, x[pl.rank() :: 2])
    assert len(part_y) == 32
    assert len(pk.shard({"a": x[:7], "b": [x[:7]]})["b"][0]) == 3
    refused(lambda: pk.shard(x, y[:3]), "same number")
    refused(lambda: pk.shard(iter([x])), "generator")

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, number):
            return x[number * 8 : number * 8 + 8], y[number * 8 : number * 8 + 8]

    parts = pk.shard(Batches())
    assert len(parts) == 2
    np.testing.assert_array_equal(parts[1][0], Batches()[2 + pl.rank()][0])
    dataset = tf.data.Dataset.from_tensor_slices((x[:41], y[:41]))
    assert int(pk.shard(dataset).cardinality()) == 20
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=8
    )
    model = make()
    model.compile("sgd", "mse")
    pk.distribute(model)
    steps = model.optimizer.paceline_exchange.switcher
    for training in (parts, pk.shard(dataset).batch(4), pk.shard(loader)):
        before = steps.steps
        model.fit(training, verbose=0)
        assert steps.steps > before
    assert_same_everywhere(model)


CHECKS = {
    check.__name__: check
    for check in (
        equals_one_process,
        large_layers,
        bad_calls,
        uneven_data,
        accumulation,
        inf_on_one_worker,
        local_pace,
        saved_model,
        compiled_again,
        without_weights,
        callbacks,
        sharded_data,
        uneven_accumulation,
    )
}

if __name__ == "__main__":
    pl.init()
    main(CHECKS)
