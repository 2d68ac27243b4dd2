"""A Keras script for Horovod with one line changed: the import. Digits of 8 x 8 pixels.

paceline run -n 2 examples/horovod/tensorflow2_keras_mnist.py
"""

import argparse

import paceline.horovod.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--checkpoint", default="")
args = parser.parse_args()

hvd.init()
digits = load_digits()
dataset = tf.data.Dataset.from_tensor_slices((digits.images[..., None] / 16, digits.target))
dataset = dataset.repeat().shuffle(1000).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
# Horovod: a larger learning rate for a larger batch, and the distributed optimizer.
scaled_lr = 0.001 * hvd.size()
opt = hvd.DistributedOptimizer(
    tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    # Horovod: start with the variables of rank 0, and average the metrics of each epoch.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
# Horovod: only rank 0 saves checkpoints and shows progress.
if hvd.rank() == 0 and args.checkpoint:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(args.checkpoint))
history = model.fit(
    dataset,
    steps_per_epoch=args.steps // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=0,
)
if hvd.rank() == 0:
    print(f"accuracy {100 * history.history['accuracy'][-1]:.1f}%", flush=True)
