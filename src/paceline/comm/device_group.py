"""The workers' collectives on a device, by the device's own backend of torch.distributed (NCCL for
CUDA), in a group beside ours.

The group belongs to Paceline. torch.distributed does not know it: the script's default group, if it
makes one, is untouched. Its members find each other through the job's authenticated store. In torch
2.13 a group in Python replaces all backends of a torch group, so that `cpu:paceline,cuda:nccl`
cannot be one group there (docs/adr/0053, 0084).

As NCCL's, the calls return at once: an operation runs after what the current stream has launched,
and `Work.wait()` lets the current stream wait, not the host.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions

from paceline.comm.devices import is_on_device, synchronize
from paceline.comm.group import Group
from paceline.errors import SetupError


class DeviceGroup:
    """Some workers, each with one device. All of them make the same calls in the same order."""

    def __init__(
        self,
        backend: str,
        device: torch.device,
        store: Store,
        ranks: tuple[int, ...],  # of the job
        rank: int,  # in the group
        timeout_s: float,
        *,
        is_link: bool = False,
    ) -> None:
        """Form the group and try it. Collective and blocking. SetupError if it does not work.

        `is_link`: of two workers, of which the first only sends, and the second only receives.
        """
        self.backend, self.device, self.size = backend, device, len(ranks)
        self.owner = f"rank {ranks[rank]}"  # this worker, for errors
        self._who = f"{self.owner}: {backend} on {device}"
        timeout = timedelta(seconds=timeout_s)
        try:
            self._group: Any = _make_backend(backend, store, rank, len(ranks), timeout)
            self._try_link() if is_link else self._try()
        except (RuntimeError, ValueError, AttributeError) as error:
            raise SetupError(
                f"{self._who} does not work: {error}; look at the output of that rank, or exchange"
                " gradients through host memory (allreduce[via=host])"
            ) from error

    def _try(self) -> None:
        """Add a number of each worker: connections are made now, and not in a backward pass."""
        one = torch.ones(1, device=self.device)
        self.all_reduce(one).wait()
        if (found := one.item()) != self.size:
            raise RuntimeError(f"1 of each of {self.size} workers add up to {found}")

    def _try_link(self) -> None:
        if self._group.rank() == 0:
            self.send(torch.ones(1, device=self.device)).wait()
            synchronize(self.device)
            return
        received = torch.zeros(1, device=self.device)
        self.receive(received).wait()
        if (found := received.item()) != 1:
            raise RuntimeError(f"a 1 was sent, and {found} arrived")

    def send(self, tensor: torch.Tensor) -> Any:
        """Start to send a contiguous tensor to the other worker of a link."""
        return self._group.send([tensor], 1, 0)

    def receive(self, tensor: torch.Tensor) -> Any:
        """Start to receive a tensor over a link, in the order of the other worker's calls."""
        return self._group.recv([tensor], 0, 0)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start to add up the tensors of all workers, in place."""
        return self._group.allreduce([tensor], dist.AllreduceOptions())

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> Any:
        """Start to collect the tensors of all workers in `out`, one after the other."""
        return self._group._allgather_base(out.view(-1), tensor.view(-1))

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to copy the first worker's tensor to all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([tensor], options)

    def close(self) -> None:
        """Leave the group after what is in flight. Not collective."""
        group, self._group = self._group, None
        if group is not None:
            synchronize(self.device)
            getattr(group, "shutdown", lambda: None)()


class StreamResult:
    """An exchange on streams; a Handle (runtime/work.py). `wait` lets the current stream wait."""

    def __init__(self, done: torch.Event, memory: object = None) -> None:
        """`memory`: what the exchange still uses; freed with the result, which was waited for."""
        self._done = done
        self._memory = memory

    def done(self) -> bool:
        return self._done.query()

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s  # the host does not wait
        torch.accelerator.current_stream(self._done.device).wait_event(self._done)

    def error(self) -> Exception | None:
        return None


class ByPlace:
    """Collectives of the workers, for tensors on the CPU and on a device. What is on the device is
    exchanged there: the current stream waits, not the host."""

    def __init__(self, on_host: Group, on_device: DeviceGroup) -> None:
        self.size = on_host.size
        self._on_host, self._on_device = on_host, on_device

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up the tensors of all workers, in place."""
        if is_on_device(tensor):
            self._on_device.all_reduce(tensor).wait()
        else:
            self._on_host.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, *, out: torch.Tensor) -> None:
        """Collect the tensors of all workers in the rows of `out`."""
        if is_on_device(tensor):
            self._on_device.all_gather(tensor, out).wait()
        else:
            self._on_host.all_gather(tensor, out=out)


def _make_backend(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a backend as torch makes it for a group of its own (distributed_c10d.py)."""
    store = PrefixStore(name, store)
    known = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}
    if name in known:
        kind: Any = getattr(dist, known[name])
        options = kind.Options()
        options._timeout = timeout
        return kind(store, rank, size, options)
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.timeout, options.group_id = store, timeout, "paceline"
    options.group_rank, options.group_size = rank, size
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)
