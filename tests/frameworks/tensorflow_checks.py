"""A loop of TensorFlow on workers; run by test_loops.py."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from environment import main

import paceline as pl
import paceline.tensorflow as pt
from paceline.errors import UsageError


def _train(average, x: np.ndarray, y: np.ndarray, start: float) -> list[np.ndarray]:
    variables = [tf.Variable(tf.fill((3, 2), start)), tf.Variable(tf.fill((2,), start))]
    pt.broadcast(variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, variables[0]) + variables[1] - y) ** 2)
        for variable, grad in zip(variables, average(tape.gradient(loss, variables)), strict=True):
            variable.assign_sub(0.1 * grad)
        return average(loss)

    for _ in range(5):
        step()
    return [variable.numpy() for variable in variables]


def custom_loop() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 3)).astype("float32")
    y = rng.standard_normal((16, 2)).astype("float32")
    mine = slice(pl.rank(), None, 2)
    got = _train(pt.mean, x[mine], y[mine], start=0.25 + pl.rank())
    for one, two in zip(got, _train(lambda t: t, x, y, start=0.25), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def kinds_of_tensors() -> None:
    rank = float(pl.rank())
    table = tf.Variable(tf.ones((4, 2)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [int(rank)]))
    sparse = tape.gradient(loss, table)
    assert isinstance(sparse, tf.IndexedSlices)
    got = pt.mean({"sparse": sparse, "none": None, "half": tf.constant(rank, tf.bfloat16)})
    np.testing.assert_array_equal(got["sparse"].numpy()[:2], np.full((2, 2), 0.5))
    assert got["none"] is None and float(got["half"]) == 0.5
    try:
        pt.mean(tf.constant([1, 2]))
    except UsageError as error:
        assert "int32" in str(error)
    else:
        raise AssertionError("means of whole numbers are not refused")


CHECKS = {check.__name__: check for check in (custom_loop, kinds_of_tensors)}

if __name__ == "__main__":
    pl.init()
    main(CHECKS)
