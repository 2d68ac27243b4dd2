"""Horovod's interface for PyTorch, on Paceline's engine: `import paceline.horovod.torch as hvd`."""

from paceline.errors import HorovodInternalError as HorovodInternalError
from paceline.horovod.objects import allgather_object as allgather_object
from paceline.horovod.objects import broadcast_object as broadcast_object
from paceline.horovod.process_sets import ProcessSet as ProcessSet
from paceline.horovod.process_sets import add_process_set as add_process_set
from paceline.horovod.process_sets import get_process_set_by_id as get_process_set_by_id
from paceline.horovod.process_sets import (
    get_process_set_ids_and_ranks as get_process_set_ids_and_ranks,
)
from paceline.horovod.process_sets import global_process_set as global_process_set
from paceline.horovod.process_sets import remove_process_set as remove_process_set
from paceline.horovod.reductions import Adasum as Adasum
from paceline.horovod.reductions import Average as Average
from paceline.horovod.reductions import Max as Max
from paceline.horovod.reductions import Min as Min
from paceline.horovod.reductions import Product as Product
from paceline.horovod.reductions import Sum as Sum
from paceline.horovod.session import ccl_built as ccl_built
from paceline.horovod.session import cross_rank as cross_rank
from paceline.horovod.session import cross_size as cross_size
from paceline.horovod.session import cuda_built as cuda_built
from paceline.horovod.session import ddl_built as ddl_built
from paceline.horovod.session import gloo_built as gloo_built
from paceline.horovod.session import gloo_enabled as gloo_enabled
from paceline.horovod.session import init as init
from paceline.horovod.session import is_homogeneous as is_homogeneous
from paceline.horovod.session import is_initialized as is_initialized
from paceline.horovod.session import local_rank as local_rank
from paceline.horovod.session import local_size as local_size
from paceline.horovod.session import mpi_built as mpi_built
from paceline.horovod.session import mpi_enabled as mpi_enabled
from paceline.horovod.session import mpi_threads_supported as mpi_threads_supported
from paceline.horovod.session import nccl_built as nccl_built
from paceline.horovod.session import rank as rank
from paceline.horovod.session import rocm_built as rocm_built
from paceline.horovod.session import shutdown as shutdown
from paceline.horovod.session import size as size
from paceline.horovod.timeline import start_timeline as start_timeline
from paceline.horovod.timeline import stop_timeline as stop_timeline
from paceline.horovod.torch import elastic as elastic
from paceline.horovod.torch.compression import Compression as Compression
from paceline.horovod.torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from paceline.horovod.torch.functions import broadcast_parameters as broadcast_parameters
from paceline.horovod.torch.grouped import grouped_allgather as grouped_allgather
from paceline.horovod.torch.grouped import grouped_allgather_async as grouped_allgather_async
from paceline.horovod.torch.grouped import grouped_allreduce as grouped_allreduce
from paceline.horovod.torch.grouped import grouped_allreduce_ as grouped_allreduce_
from paceline.horovod.torch.grouped import grouped_allreduce_async as grouped_allreduce_async
from paceline.horovod.torch.grouped import grouped_allreduce_async_ as grouped_allreduce_async_
from paceline.horovod.torch.grouped import grouped_reducescatter as grouped_reducescatter
from paceline.horovod.torch.grouped import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from paceline.horovod.torch.operations import allgather as allgather
from paceline.horovod.torch.operations import allgather_async as allgather_async
from paceline.horovod.torch.operations import allreduce as allreduce
from paceline.horovod.torch.operations import allreduce_ as allreduce_
from paceline.horovod.torch.operations import allreduce_async as allreduce_async
from paceline.horovod.torch.operations import allreduce_async_ as allreduce_async_
from paceline.horovod.torch.operations import alltoall as alltoall
from paceline.horovod.torch.operations import alltoall_async as alltoall_async
from paceline.horovod.torch.operations import barrier as barrier
from paceline.horovod.torch.operations import broadcast as broadcast
from paceline.horovod.torch.operations import broadcast_ as broadcast_
from paceline.horovod.torch.operations import broadcast_async as broadcast_async
from paceline.horovod.torch.operations import broadcast_async_ as broadcast_async_
from paceline.horovod.torch.operations import join as join
from paceline.horovod.torch.operations import poll as poll
from paceline.horovod.torch.operations import reducescatter as reducescatter
from paceline.horovod.torch.operations import reducescatter_async as reducescatter_async
from paceline.horovod.torch.operations import sparse_allreduce_async as sparse_allreduce_async
from paceline.horovod.torch.operations import synchronize as synchronize
from paceline.horovod.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from paceline.horovod.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
