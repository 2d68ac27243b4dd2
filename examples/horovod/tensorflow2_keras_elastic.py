"""Elastic Keras training with commits: Horovod's elastic script with the import changed.

paceline run -n 3 --min 2 --max 3 examples/horovod/tensorflow2_keras_elastic.py
"""

import argparse
import os
import signal

import paceline.horovod.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--kill-rank-at", type=int, default=-1, help="rank 1 ends at this batch")
parser.add_argument("--until-joined", action="store_true", help="train until a worker has joined")
args = parser.parse_args()

hvd.init()
digits = load_digits()
dataset = tf.data.Dataset.from_tensor_slices((digits.images[..., None] / 16, digits.target))
dataset = dataset.repeat().shuffle(1000).batch(32)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
opt = hvd.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()))
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
# Horovod: one step makes the variables, which are sent to newcomers.
model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)


class KillRank(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == args.kill_rank_at and hvd.rank() == 1 and state.fewest == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class Show(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            text = f"epoch {state.epoch}: {hvd.size()} workers, accuracy {logs['accuracy']:.2f}"
            print(text, flush=True)
        if args.until_joined and hvd.size() > state.fewest:
            self.model.stop_training = True  # on all workers: they have the same state


@hvd.elastic.run
def train(state):
    model.fit(
        dataset,
        steps_per_epoch=args.steps // hvd.size(),
        epochs=1_000_000 if args.until_joined else args.epochs - state.epoch,
        verbose=0,
        callbacks=[
            KillRank(),
            Show(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
        ],
    )


def on_state_reset():
    opt.learning_rate = 0.001 * hvd.size()
    state.fewest = min(state.fewest, hvd.size())
    if hvd.rank() == 0:
        print(f"continues with {hvd.size()} workers", flush=True)


state = hvd.elastic.KerasState(model, batch=0, epoch=0, fewest=hvd.size())
state.register_reset_callbacks([on_state_reset])
train(state)
