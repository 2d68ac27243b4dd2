"""JAX loops on workers: mean and broadcast; run by test_loops.py."""

from __future__ import annotations

import resource

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from environment import main
from flax import linen

import paceline as pl
import paceline.jax as pj
from paceline.errors import UsageError
from paceline.jax import host_call


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 5)).astype("float32")
    return x, (x[:, :1] - 2 * x[:, 1:2]).astype("float32")


def mine(array: np.ndarray) -> np.ndarray:
    return array[pl.rank() :: pl.world_size()]


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.tanh(linen.Dense(8)(x)))


def _train(average, x, y, key: int) -> tuple[dict, float]:
    model, optimizer = Net(), optax.adam(0.05)
    params = model.init(jax.random.key(key), x)
    params = pj.broadcast(params)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        def loss_of(params):
            return ((model.apply(params, x) - y) ** 2).mean()

        loss, grads = average(jax.value_and_grad(loss_of)(params))
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(10):
        params, state, loss = step(params, state)
    return params, float(loss)


def flax_and_optax() -> None:
    """The usual loop, with its gradients averaged inside of jit, equals one process."""
    x, y = samples()
    params, loss = _train(pj.mean, mine(x), mine(y), key=pl.rank())
    alone, expected = _train(lambda tree: tree, x, y, key=0)
    for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def equinox_loop() -> None:
    """A model that is a tree with functions in it."""
    model = pj.broadcast(equinox.nn.MLP(5, 1, 8, 1, key=jax.random.key(pl.rank())))
    x, y = map(mine, samples())
    optimizer = optax.sgd(0.05)
    state = optimizer.init(equinox.filter(model, equinox.is_array))

    @equinox.filter_jit
    def step(model, state):
        loss, grads = equinox.filter_value_and_grad(
            lambda model: ((jax.vmap(model)(x) - y) ** 2).mean()
        )(model)
        loss, grads = pj.mean((loss, grads))
        updates, state = optimizer.update(grads, state)
        return equinox.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(20):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(equinox.filter(model, equinox.is_array))]
    everyone = pl.world().all_gather(np.concatenate([leaf.ravel() for leaf in leaves]))
    np.testing.assert_array_equal(everyone[0], everyone[1])


def kinds_of_arrays() -> None:
    """Half precision, empty arrays, scalars, outside of jit, and what is refused."""
    rank = pl.rank()
    tree = {
        "half": jnp.full(3, rank, jnp.bfloat16),
        "empty": jnp.zeros((0, 4)),
        "scalar": 1.0 + rank,
        "float16": jnp.full((2, 2), 2.0 * rank, jnp.float16),
    }
    for average in (pj.mean, jax.jit(pj.mean)):
        got = average(tree)
        assert got["half"].dtype == jnp.bfloat16 and float(got["half"][0]) == 0.5
        assert got["empty"].shape == (0, 4)
        assert float(got["scalar"]) == 1.5 and float(got["float16"][1, 1]) == 1.0
    assert float(tree["half"][0]) == rank  # the argument is not changed
    try:
        pj.mean(jnp.arange(3))
    except UsageError as error:
        assert "int32" in str(error)
    else:
        raise AssertionError("means of whole numbers are not refused")
    if rank == 0:  # both kinds of calls were used, in a job with a compiler
        assert host_call._target() == "paceline_host_call"


def memory_is_kept() -> None:
    """A step whose temporary memory is larger than a thread's heap maps no new pages."""
    rows = jnp.ones((3000, 3000)) * pl.rank()

    @jax.jit
    def step(rows):
        means = pj.mean([rows * number for number in range(1, 4)])  # 108 MB
        return sum(mean.sum() for mean in means)

    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        float(step(rows))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) < 4000, faults  # 26,000 pages if the memory was returned


def without_a_compiler() -> None:
    """The same through JAX's callback."""
    host_call._target.cache_clear()
    host_call.host_call_library.load = lambda *_: None
    x, y = samples()
    params, _ = _train(pj.mean, mine(x), mine(y), key=pl.rank())
    alone, _ = _train(lambda tree: tree, x, y, key=0)
    for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


CHECKS = {
    check.__name__: check
    for check in (
        flax_and_optax,
        equinox_loop,
        kinds_of_arrays,
        memory_is_kept,
        without_a_compiler,
    )
}

if __name__ == "__main__":
    pl.init()
    main(CHECKS)
