"""Horovod's operations on TensorFlow's tensors; run by test_horovod_frameworks.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from environment import main

import paceline.horovod.tensorflow as hvd


def both(function):
    """Return a function's results, eagerly and from a graph."""
    return [function(), tf.function(function)()]


def values() -> None:
    """Every operation, eagerly and in tf.function, with the dtypes that Horovod takes."""
    me, n = hvd.rank(), hvd.size()
    total = n * (n + 1) // 2
    mine = tf.fill([5, 2], float(me + 1))
    for mean in both(lambda: hvd.allreduce(mine)):
        np.testing.assert_array_equal(mean, np.full((5, 2), total / n))
    for op, expected in ((hvd.Sum, total), (hvd.Max, n), (hvd.Min, 1), (hvd.Product, 2)):
        for reduced in both(lambda op=op: hvd.allreduce(mine, op=op)):
            assert float(reduced[0, 0]) == expected, op
    assert hvd.allreduce(mine, average=False)[0, 0] == total
    for dtype in ("uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16"):
        whole = tf.cast(tf.fill([3], me + 1), dtype)
        for reduced in both(lambda x=whole: hvd.allreduce(x, op=hvd.Sum)):
            assert reduced.dtype == whole.dtype and float(reduced[0]) == total
    assert hvd.allreduce(tf.constant(me + 1)).numpy() == total // n  # integers: towards zero
    assert hvd.allreduce(float(me)).shape == ()
    half = hvd.allreduce(mine, compression=hvd.Compression.fp16)
    assert half.dtype == tf.float32 and half[0, 0] == total / n
    large = tf.constant([2**40 + 1], tf.int64)
    assert hvd.allreduce(large, op=hvd.Sum, prescale_factor=0.5).numpy() == n * 2**39
    for sums in both(lambda: hvd.grouped_allreduce([mine, whole], op=hvd.Sum)):
        assert float(sums[0][0, 0]) == float(sums[1][0]) == total
    rows = tf.fill([me + 1, 2], me)
    for gathered in both(lambda: hvd.allgather(rows)):
        assert gathered.numpy().tolist() == [[r, r] for r in range(n) for _ in range(r + 1)]
    assert hvd.allgather(tf.constant([me == 0])).numpy().tolist() == [True, False]
    assert len(hvd.grouped_allgather([rows, mine], name="both")) == 2
    for sent in both(lambda: hvd.broadcast(mine, root_rank=1, name="root")):
        assert sent[0, 0] == 2
    for swapped in both(lambda: hvd.alltoall(tf.range(n) + 10 * me)):
        assert swapped.numpy().tolist() == [10 * r + me for r in range(n)]
    back, received = hvd.alltoall(tf.range(3) + 10 * me, splits=[1, 2] if me else [2, 1])
    assert received.numpy().tolist() == [[2, 1], [1, 2]][me]
    assert back.numpy().tolist() == [[0, 1, 10], [2, 11, 12]][me]
    for part in both(lambda: hvd.reducescatter(tf.range(3.0), op=hvd.Sum)):
        assert part.numpy().tolist() == [[0, 2], [4]][me]
    assert len(hvd.grouped_reducescatter([mine, mine])) == 2
    for number in both(lambda: hvd.size_op() * 10 + hvd.rank_op()):
        assert int(number) == 10 * n + me
    assert int(hvd.local_size_op()) == n and int(hvd.local_rank_op()) == me
    variable = tf.Variable([float(me)] * 3)
    hvd.broadcast_variables([variable], root_rank=1)
    assert variable.numpy().tolist() == [1.0] * 3
    assert hvd.broadcast_object({"epoch": me}, root_rank=1) == {"epoch": 1}
    assert hvd.allgather_object(me) == [0, 1] and hvd.broadcast_object_fn(1)(me) == 1
    hvd.barrier()


def gradients() -> None:
    """Gradients flow through operations, as in Horovod."""
    me, n = hvd.rank(), hvd.size()
    total = n * (n + 1) // 2

    def gradient(operation, shape=(3,), weight=1.0):
        def run():
            x = tf.ones(shape)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = operation(x)
                loss = tf.reduce_sum(y * weight)
            return tape.gradient(loss, x)

        eager, graph = both(run)
        np.testing.assert_array_equal(eager, graph)
        assert eager.shape == shape
        return eager.numpy().ravel().tolist()

    assert gradient(hvd.allreduce) == [1] * 3
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)) == [n] * 3
    assert gradient(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0]) == [n] * 3
    assert gradient(hvd.allgather, (me + 1, 1), me + 1.0) == [total / n] * (me + 1)
    assert gradient(lambda x: hvd.broadcast(x, 0)) == [1.0 if me == 0 else 0.0] * 3
    assert gradient(hvd.alltoall, (n,), 2.0) == [2.0] * n
    assert gradient(lambda x: hvd.alltoall(x, [1] * n)[0], (n + 1,)) == [1.0] * n + [0.0]
    assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), (n,)) == [n] * n
    assert gradient(hvd.reducescatter, (n,)) == [1] * n


def tape() -> None:
    """DistributedGradientTape: made before or after the recording, in a graph, sparse, local."""
    me, n = hvd.rank(), hvd.size()
    w, unused, table = tf.Variable([2.0, 3.0]), tf.Variable(1.0), tf.Variable(tf.ones((4, 2)))
    x = tf.constant([1.0 + me, 5.0])

    def after():
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(w * x)
        return hvd.DistributedGradientTape(plain).gradient(loss, [w, unused])

    def before():
        with hvd.DistributedGradientTape(tf.GradientTape()) as recording:
            loss = tf.reduce_sum(w * x)
        return recording.gradient(loss, [w, unused])

    for make in (after, before):
        for mean, none in both(make):
            assert mean.numpy().tolist() == [1.5, 5.0] and none is None
    options = {
        "sum": ({"op": hvd.Sum}, [3.0, 10.0]),
        "divided": ({"gradient_predivide_factor": 2.0}, [1.5, 5.0]),
        "half": ({"compression": hvd.Compression.fp16}, [1.5, 5.0]),
    }
    for given, expected in options.values():
        with tf.GradientTape(persistent=True) as plain:
            loss = tf.reduce_sum(w * x)
        distributed = hvd.DistributedGradientTape(plain, **given)
        assert distributed.gradient(loss, w).numpy().tolist() == expected
        assert distributed.gradient(loss, {"w": w})["w"].numpy().tolist() == expected
    for as_dense in (False, True):

        def sparse(as_dense=as_dense):
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(tf.gather(table, [me, 3]))
            wrapped = hvd.DistributedGradientTape(plain, sparse_as_dense=as_dense)
            return wrapped.gradient(loss, [table])

        for [grad] in both(sparse):
            assert isinstance(grad, tf.IndexedSlices) != as_dense
            np.testing.assert_array_equal(
                tf.convert_to_tensor(grad)[:, 0], np.array([0.5, 0.5, 0.0, 1.0])
            )
    with tf.GradientTape() as plain:
        loss = tf.reduce_sum(w * x) + unused * (1.0 + me)
    distributed = hvd.DistributedGradientTape(plain)
    distributed.register_local_source(unused)
    shared, local = distributed.gradient(loss, [w, unused])
    assert shared.numpy().tolist() == [1.5, 5.0] and float(local) == (1.0 + me) / n
    # Values of an earlier step stay: TensorFlow has memory of its own.
    first = after()[0]
    x = x * 2
    assert after()[0].numpy().tolist() == [3.0, 10.0] and first.numpy().tolist() == [1.5, 5.0]


def rules() -> None:
    """Order-free names, a mismatch that ends one operation, join, process sets, refusals."""
    me = hvd.rank()
    names = ["one", "two"] if me else ["two", "one"]
    import threading

    results = {}

    def run(name):
        results[name] = float(hvd.allreduce(tf.constant(float(len(name) + me)), name=name))

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"one": 3.5, "two": 3.5}
    shape = [2 + me]
    for error in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
        with pytest.raises(error, match="wrong"):
            hvd.allreduce(tf.ones(shape), name="wrong")
    with pytest.raises(tf.errors.OpError, match="graph.shape"):
        tf.function(lambda: hvd.allreduce(tf.ones(shape), name="graph.shape"))()
    assert float(hvd.allreduce(1.0)) == 1.0
    for call, words in (
        (lambda: hvd.allreduce(1.0, op=hvd.Adasum), "Adasum"),
        (lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum), "Adasum"),
        (lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max), "Average or Sum"),
        (lambda: hvd.DistributedGradientTape("tape"), "GradientTape"),
        (lambda: hvd.allreduce(tf.constant(["text"])), "cannot be sent"),
        (lambda: hvd.broadcast(1.0, root_rank=7), "root rank 7"),
        (lambda: hvd.broadcast_variables([tf.ones(1)], 0), "is not a variable"),
        (lambda: hvd.broadcast_global_variables(0), "broadcast_variables"),
        (lambda: hvd.DistributedOptimizer("sgd"), "'sgd'"),
        (lambda: hvd.ProcessSet([0, 0]), "named twice"),
        (lambda: hvd.add_process_set(hvd.ProcessSet([0, 9])), r"\[9\] are not ranks"),
        (lambda: hvd.allreduce(1.0, process_set=hvd.ProcessSet([0])), "has not been added"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    own = [hvd.add_process_set([rank]) for rank in range(2)][me]
    assert float(hvd.allreduce(me + 1.0, op=hvd.Sum, process_set=own)) == me + 1.0
    assert hvd.size_op(own.process_set_id) == 1
    with tf.GradientTape() as plain:
        x = tf.constant(float(me))
        plain.watch(x)
        loss = x * x
    alone = hvd.DistributedGradientTape(plain, process_set=own)
    assert float(alone.gradient(loss, x)) == 2.0 * me
    # Rank 1 has more steps: rank 0 contributes zeros.
    w = tf.Variable([2.0])
    for _ in range(1 + me):
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(w * 4.0)
        [grad] = hvd.DistributedGradientTape(plain).gradient(loss, [w])
    assert int(hvd.join()) == 1
    assert grad.numpy().tolist() == [2.0 if me else 4.0]
    if me:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allgather(tf.ones(1), name="joined")
    hvd.join()


def batch_norm() -> None:
    """SyncBatchNormalization on parts of a batch equals batch normalization on all of it."""
    import keras

    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4, 3)).astype("float32")
    mine = x[:4] if hvd.rank() == 0 else x[4:]
    plain = keras.layers.BatchNormalization()
    synced = hvd.SyncBatchNormalization()
    for _ in range(2):
        expected, got = plain(x, training=True), synced(mine, training=True)
    rows = slice(0, 4) if hvd.rank() == 0 else slice(4, 6)
    np.testing.assert_allclose(got, expected[rows], rtol=1e-4, atol=1e-5)
    for one, two in zip(plain.weights, synced.weights, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def again() -> None:
    """init after shutdown; operations in between are refused."""
    for _ in range(2):
        hvd.shutdown()
        for call in (hvd.rank, lambda: hvd.allreduce(1.0), hvd.barrier, lambda: hvd.join()):
            with pytest.raises(ValueError, match="has not been initialized"):
                call()
        hvd.init()
        tape()


CHECKS = {check.__name__: check for check in (values, gradients, tape, rules, batch_norm, again)}

if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")  # it warns of the many small graphs
    hvd.init()
    main(CHECKS)
