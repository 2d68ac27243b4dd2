"""SyncBatchNormalization: batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Sum
from paceline.horovod.tensorflow.host import tf
from paceline.horovod.tensorflow.operations import allreduce

keras: Any = require("keras")


@keras.saving.register_keras_serializable(package="paceline")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """keras.layers.BatchNormalization that uses, in training, the statistics of all ranks."""

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any):
        if keras.config.backend() != "tensorflow":
            raise UsageError(
                f"SyncBatchNormalization: KERAS_BACKEND is {keras.config.backend()}; expected"
                " tensorflow"
            )
        super().__init__(*args, **kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if mask is not None:
            raise UsageError("SyncBatchNormalization: inputs with a mask are not supported")
        x = tf.cast(inputs, tf.float32)  # sums of float16 would overflow
        axes = [axis for axis in range(len(x.shape)) if axis != self.axis % len(x.shape)]
        sums = tf.reduce_sum(x, axes), tf.reduce_sum(tf.square(x), axes)
        count = tf.cast(tf.size(x) / tf.shape(x)[self.axis], tf.float32)
        packed = tf.concat([*sums, [count]], 0)
        total = allreduce(packed, op=Sum, process_set=self._process_set)
        width = tf.shape(sums[0])[0]
        mean = total[:width] / total[-1]
        variance = total[width:-1] / total[-1] - tf.square(mean)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
