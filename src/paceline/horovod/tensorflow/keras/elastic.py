"""The elastic training of horovod.keras."""

from paceline.horovod.keras.elastic import CommitStateCallback as CommitStateCallback
from paceline.horovod.keras.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from paceline.horovod.keras.elastic import KerasState as KerasState
from paceline.horovod.keras.elastic import ObjectState as ObjectState
from paceline.horovod.keras.elastic import State as State
from paceline.horovod.keras.elastic import UpdateBatchStateCallback as UpdateBatchStateCallback
from paceline.horovod.keras.elastic import UpdateEpochStateCallback as UpdateEpochStateCallback
from paceline.horovod.keras.elastic import run as run
