"""The callbacks of horovod.keras."""

from paceline.horovod.keras.callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from paceline.horovod.keras.callbacks import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
)
from paceline.horovod.keras.callbacks import (
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from paceline.horovod.keras.callbacks import MetricAverageCallback as MetricAverageCallback
