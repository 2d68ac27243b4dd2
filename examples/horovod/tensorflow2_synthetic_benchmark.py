"""Samples per second on random data: Horovod's TensorFlow benchmark with the import changed.

paceline run -n 2 examples/horovod/tensorflow2_synthetic_benchmark.py
"""

import argparse
import timeit

import numpy as np
import paceline.horovod.tensorflow as hvd  # was: import horovod.tensorflow as hvd
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
layers = [tf.keras.layers.Dense(args.width, activation="relu") for _ in range(2)]
model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(1000, activation="softmax")])
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([args.batch_size, args.width])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=999, dtype=tf.int64)
loss_of = tf.losses.SparseCategoricalCrossentropy()
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def benchmark_step(first_batch):
    # Horovod: a distributed tape around the recording.
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = loss_of(target, probs)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


benchmark_step(first_batch=True)
timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_warmup_batches)
rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(
        lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter
    )
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
log(f"samples/s per process: {np.mean(rates):.1f} +- {1.96 * np.std(rates):.1f}")
log(f"total on {hvd.size()} processes: {hvd.size() * np.mean(rates):.1f}")
