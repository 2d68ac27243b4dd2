"""A script of Keras 3 for Horovod with one line changed: the import. Digits of 8 x 8 pixels.

KERAS_BACKEND=torch paceline run -n 2 examples/horovod/keras_mnist.py    (or tensorflow, jax)
"""

import argparse
import math

import keras
import paceline.horovod.keras as hvd  # was: import horovod.keras as hvd
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
args = parser.parse_args()

hvd.init()
# Horovod: fewer epochs on more ranks, each of which sees all samples.
epochs = math.ceil(args.epochs / hvd.size())
digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
x_train, y_train = images[:1500], keras.utils.to_categorical(digits.target[:1500], 10)
x_test, y_test = images[1500:], keras.utils.to_categorical(digits.target[1500:], 10)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, (3, 3), activation="relu"),
        keras.layers.Conv2D(32, (3, 3), activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
# Horovod: a larger learning rate for a larger batch, and the distributed optimizer.
opt = keras.optimizers.Adadelta(1.0 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.LearningRateScheduleCallback(1.0 * hvd.size(), lambda epoch: 0.9**epoch),
]
model.fit(x_train, y_train, batch_size=32, callbacks=callbacks, epochs=epochs, verbose=0)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"accuracy {100 * accuracy:.1f}%", flush=True)
