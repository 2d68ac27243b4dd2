"""A TensorFlow loop for Horovod with one line changed: the import. Digits of 8 x 8 pixels.

paceline run -n 2 examples/horovod/tensorflow2_mnist.py
"""

import argparse

import paceline.horovod.tensorflow as hvd  # was: import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--checkpoint", default="")
args = parser.parse_args()

hvd.init()
digits = load_digits()
images = tf.constant(digits.images[..., None] / 16, tf.float32)
labels = tf.constant(digits.target, tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss_of = tf.losses.SparseCategoricalCrossentropy()
# Horovod: a larger learning rate for a larger batch.
opt = tf.optimizers.Adam(args.lr * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss = loss_of(labels, probs)
    # Horovod: reduce the gradients over all ranks.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905
    # Horovod: start with the variables of rank 0. After the first step, when all exist.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss


for batch, (x, y) in enumerate(dataset.take(args.steps // hvd.size())):
    loss = training_step(x, y, batch == 0)
    if batch % 50 == 0 and hvd.rank() == 0:
        print(f"step {batch}: loss {float(loss):.3f}", flush=True)
accuracy = tf.reduce_mean(tf.cast(tf.argmax(model(images), 1) == labels, tf.float32))
accuracy = hvd.allreduce(accuracy, name="accuracy")
if hvd.rank() == 0:
    print(f"accuracy {100 * float(accuracy):.1f}%", flush=True)
    if args.checkpoint:
        model.save(args.checkpoint)
