"""Horovod's interface for TensorFlow 2, on Paceline's engine.

import paceline.horovod.tensorflow as hvd

    host.py          how tensors reach the host, eagerly and from a graph
    operations.py    allreduce, allgather, broadcast, alltoall, reducescatter, with gradients
    queries.py       barrier, join, and the job's numbers as tensors
    gradients.py     DistributedGradientTape
    optimizer.py     DistributedOptimizer
    variables.py     broadcasts of variables and objects
    keras/           horovod.tensorflow.keras

Importing this imports TensorFlow.
"""

from paceline.horovod.basics import *  # noqa: F403
from paceline.horovod.compression import Compression as Compression
from paceline.horovod.tensorflow import elastic as elastic
from paceline.horovod.tensorflow.gradients import (
    DistributedGradientTape as DistributedGradientTape,
)
from paceline.horovod.tensorflow.gradients import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from paceline.horovod.tensorflow.operations import allgather as allgather
from paceline.horovod.tensorflow.operations import allreduce as allreduce
from paceline.horovod.tensorflow.operations import alltoall as alltoall
from paceline.horovod.tensorflow.operations import broadcast as broadcast
from paceline.horovod.tensorflow.operations import grouped_allgather as grouped_allgather
from paceline.horovod.tensorflow.operations import grouped_allreduce as grouped_allreduce
from paceline.horovod.tensorflow.operations import grouped_reducescatter as grouped_reducescatter
from paceline.horovod.tensorflow.operations import reducescatter as reducescatter
from paceline.horovod.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from paceline.horovod.tensorflow.queries import barrier as barrier
from paceline.horovod.tensorflow.queries import join as join
from paceline.horovod.tensorflow.queries import local_rank_op as local_rank_op
from paceline.horovod.tensorflow.queries import local_size_op as local_size_op
from paceline.horovod.tensorflow.queries import process_set_included_op as process_set_included_op
from paceline.horovod.tensorflow.queries import rank_op as rank_op
from paceline.horovod.tensorflow.queries import size_op as size_op
from paceline.horovod.tensorflow.sync_batch_norm import (
    SyncBatchNormalization as SyncBatchNormalization,
)
from paceline.horovod.tensorflow.variables import allgather_object as allgather_object
from paceline.horovod.tensorflow.variables import broadcast_ as broadcast_
from paceline.horovod.tensorflow.variables import (
    broadcast_global_variables as broadcast_global_variables,
)
from paceline.horovod.tensorflow.variables import broadcast_object as broadcast_object
from paceline.horovod.tensorflow.variables import broadcast_object_fn as broadcast_object_fn
from paceline.horovod.tensorflow.variables import broadcast_variables as broadcast_variables
