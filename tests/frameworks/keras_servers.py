"""A Keras model on parameter servers; run by test_keras_servers.py with two workers, one server."""

from __future__ import annotations

import keras
import numpy as np
from environment import main
from keras_models import (
    BATCH,
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


def _fit_falling(model: keras.Model, pace: str) -> list[float]:
    model.compile(keras.optimizers.SGD(0.02), "mse")
    pk.distribute(model, pace=pace)
    losses = fit_mine(model, epochs=4).history["loss"]
    assert losses[-1] < losses[0] / 2, losses
    return losses


def ps_equals_one_process() -> None:
    """In lockstep the servers compute what one process computes, also if the rate changes."""
    for optimizer, rate, tolerance in (
        (keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), None, 2e-5),
        (keras.optimizers.SGD(0.05), 0.02, 2e-5),
        (keras.optimizers.Adam(0.01), 0.005, 2e-3),  # torch adds epsilon elsewhere
    ):
        plain = type(optimizer).from_config(optimizer.get_config())
        alone = same_start(make())
        alone.compile(plain, "mse")
        model = same_start(make())
        model.compile(optimizer, "mse")
        pk.distribute(model, pace="ps")
        for epoch in range(3):
            if epoch == 2 and rate is not None:
                plain.learning_rate = optimizer.learning_rate = rate
            fit_alone(alone, epochs=1)
            fit_mine(model, epochs=1)
        assert_close(model, alone, tolerance)
        assert_same_everywhere(model)
        assert int(model.optimizer.iterations) == 3 * data()[0].shape[0] // BATCH


def free_paces() -> None:
    """Workers that do not wait for each other learn, too."""
    _fit_falling(make(), "async")
    _fit_falling(make(norm=True), "ssp:2")


def uneven_in_lockstep() -> None:
    x, y = data()
    rows = slice(0, 40) if pl.rank() == 0 else slice(40, 60)
    model = make()
    model.compile("sgd", "mse")
    pk.distribute(model, pace="ps")
    model.fit(x[rows], y[rows], batch_size=4, epochs=2, verbose=0)
    assert_same_everywhere(model)


def refusals() -> None:
    """An optimizer that servers cannot run is refused before anything is sent."""
    for optimizer, word in (
        (keras.optimizers.Lion(), "Lion"),
        (keras.optimizers.SGD(clipnorm=1.0), "clipnorm"),
    ):
        model = make()
        model.compile(optimizer, "mse")
        try:
            pk.distribute(model, pace="ps")
        except UsageError as error:
            assert word in str(error) and "allreduce" in str(error), error
        else:
            raise AssertionError(f"{word} was not refused")
    assert np.isfinite(model.get_weights()[0]).all()


CHECKS = {
    check.__name__: check
    for check in (ps_equals_one_process, free_paces, uneven_in_lockstep, refusals)
}

if __name__ == "__main__":
    pl.init()
    main(CHECKS)
