"""Horovod's interface for Keras 3, under the name of tf.keras: on any backend of Keras.

import paceline.horovod.tensorflow.keras as hvd
"""

from paceline.horovod.basics import *  # noqa: F403
from paceline.horovod.compression import Compression as Compression
from paceline.horovod.keras.optimizer import load_model as load_model
from paceline.horovod.keras.values import allgather as allgather
from paceline.horovod.keras.values import allreduce as allreduce
from paceline.horovod.keras.values import broadcast as broadcast
from paceline.horovod.keras.values import broadcast_global_variables as broadcast_global_variables
from paceline.horovod.keras.values import reducescatter as reducescatter
from paceline.horovod.keras.variables import broadcast_variables as broadcast_variables
from paceline.horovod.objects import allgather_object as allgather_object
from paceline.horovod.objects import broadcast_object as broadcast_object
from paceline.horovod.tensorflow.keras import callbacks as callbacks
from paceline.horovod.tensorflow.keras import elastic as elastic
from paceline.horovod.tensorflow.keras.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
)
from paceline.horovod.torch.operations import barrier as barrier
from paceline.horovod.torch.operations import join as join
