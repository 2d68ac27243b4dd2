"""Accelerators: the one module that knows them.

All other code has tensors, and asks here which device this process has, whether host memory can be
pinned, which collective backend a device brings, and for its random state and memory figures. The
streams and copies that it uses are in comm/device_route.py. Everything goes through
`torch.accelerator` and `torch.get_device_module`, so a device that registers itself with PyTorch
works without a change here. `torch.cuda` is used in one place, to register host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.utils import dlpack

from paceline.errors import ConfigError
from paceline.runtime.device_request import DeviceRequest

CPU = torch.device("cpu")
TESTED_TORCH = "2.13"  # devices use parts of torch that change between versions


# -- which device ---------------------------------------------------------------------------------


def accelerator() -> str | None:
    """Return the type of this machine's accelerator, or None if it has none that can be used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def choose_device(
    request: DeviceRequest, local_rank: int, num_local: int, *, sees_some: bool = False
) -> torch.device:
    """Return the device of a worker: number `local_rank` of `num_local` workers on this host.

    ConfigError if there is none for it. `sees_some`: a variable hides devices from this process,
    and perhaps others from its neighbours; whether two workers have the same device can then be
    found out only together (`require_own_devices`).
    """
    kind = accelerator()
    if request.kind == "cpu" or (request.kind == "auto" and kind is None):
        return CPU
    if kind is None or request.kind not in ("auto", kind):
        raise ConfigError(
            f"devices {request}: this machine has {_found(kind)}; use --devices auto or cpu, or a"
            f" build of PyTorch for {request.kind}"
        )
    count = torch.accelerator.device_count()
    missing = [index for index in request.indices if index >= count]
    if missing:
        raise ConfigError(
            f"devices {request}: there is no {kind}:{missing[0]} on this host, which has"
            f" {_found(kind)}; name devices from 0 to {count - 1}"
        )
    indices = request.indices or tuple(range(count))
    if num_local > len(indices) and (request.indices or not sees_some):
        raise ConfigError(
            f"{num_local} workers on this host for {_plural(len(indices), f'{kind} device')}: start"
            f" fewer workers, name a device for each worker (--devices"
            f" {kind}:{','.join(str(indices[i % len(indices)]) for i in range(num_local))} lets"
            " workers share one), or train on the CPU (--devices cpu)"
        )
    # A newcomer of an elastic job may have a higher number than there are workers.
    return torch.device(kind, indices[local_rank % len(indices)])


def require_own_devices(identities: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if two workers have the same device by accident.

    `identities`: by rank, the host and the name of the device there.
    """
    ranks: dict[tuple[str, str], int] = {}
    for rank, identity in enumerate(identities):
        other = ranks.setdefault(identity, rank)
        if other != rank:
            raise ConfigError(
                f"ranks {other} and {rank} have the same device, {identity[1]}: start fewer workers"
                " on their host, show each worker another device, or name the device twice"
                " (--devices cuda:0,0) to let workers share it"
            )


def _found(kind: str | None) -> str:
    if kind is None:
        return "no accelerator that this PyTorch can use"
    return _plural(torch.accelerator.device_count(), f"{kind} device")


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def select_device(device: torch.device) -> None:
    """Make a device the current one of this thread."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def current_device() -> torch.device:
    """Return the current accelerator of this thread; the CPU if the machine has none."""
    kind = accelerator()
    return CPU if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def untested_version() -> str | None:
    """Return a remark if this version of torch was never tried with devices, else None."""
    version = str(torch.__version__)
    if version.startswith(f"{TESTED_TORCH}."):
        return None
    return (
        f"devices were tested with torch {TESTED_TORCH}, and this is torch {version}: if something"
        " fails, name both in an issue"
    )


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in the memory of an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the accelerators that hold some of these tensors, each once, in order."""
    return list(dict.fromkeys(t.device for t in tensors if is_on_device(t)))


def in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory, with a storage that ends with the view.

    torch.save writes whole storages, and refuses one that has two dtypes.
    """
    # As a capsule: of a tensor itself DLPack accepts only types of devices that it has a name for.
    separate: torch.Tensor = dlpack.from_dlpack(dlpack.to_dlpack(view))  # type: ignore[attr-defined]
    return separate


def module_of(device: torch.device | str) -> ModuleType:
    """Return the module of a type of device: `torch.cuda`, `torch.xpu` and so on."""
    return torch.get_device_module(device)  # type: ignore[no-any-return]


def is_started() -> bool:
    """Return whether this process uses an accelerator already, so that it cannot be forked.

    Does not start one.
    """
    return _started() is not None


def _started() -> str | None:
    """Return the type of the accelerator that this process uses already, or None."""
    built_for = torch.accelerator.current_accelerator()  # does not ask the driver
    if built_for is None:
        return None
    is_initialized = getattr(module_of(built_for), "is_initialized", bool)
    return built_for.type if is_initialized() else None


def stream_reader(device: torch.device) -> Callable[[], torch.Stream]:
    """Return a function that returns the current stream of a device on the calling thread.

    For code that runs for each gradient: torch.accelerator.current_stream looks the device up in
    each call, which takes ten times as long as the rest.
    """
    read = getattr(torch._C, "_accelerator_getStream", None)
    if read is None:
        return partial(torch.accelerator.current_stream, device)
    return partial(read, device.index)


def synchronize(device: torch.device) -> None:
    """Wait on the host until a device has done all of its work. For measuring, and at the end."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# -- collectives ----------------------------------------------------------------------------------


def collective_backend(device: torch.device) -> str | None:
    """Return the name of the device's own backend of torch.distributed, or None.

    A backend that moves tensors through host memory (gloo) does not count: our engine does that.
    """
    if not torch.distributed.is_available():
        return None
    backend = torch.distributed.Backend
    name = backend.default_device_backend_map.get(device.type)
    if name is None or name in ("gloo", "mpi", "fake", "paceline"):
        return None
    is_built = getattr(torch.distributed, f"is_{name}_available", lambda: True)
    return str(name) if is_built() else None


# -- pinned host memory ---------------------------------------------------------------------------


class Pin:
    """Host memory that is registered with a device until `close`; holds the memory meanwhile."""

    def __init__(self, tensor: torch.Tensor, unregister: Callable[[int], object]) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._unregister = unregister

    def close(self) -> None:
        """Unregister. No copy may be in flight. May be called twice."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._unregister(tensor.data_ptr())


def register_pinned(tensor: torch.Tensor, device: torch.device) -> Pin | None:
    """Register contiguous host memory with a device, so that copies are asynchronous.

    No other registered memory may be on the same pages. Returns None where the runtime does not do
    that: `pinned_like` then returns memory that a copy can be staged through.
    """
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return None
    with contextlib.suppress(RuntimeError, OSError):  # refused: limits, kind of memory, no driver
        for register, unregister in _registrations(device):
            register(tensor.data_ptr(), size)
            return Pin(tensor, unregister)
    return None


def _registrations(
    device: torch.device,
) -> list[tuple[Callable[[int, int], object], Callable[[int], object]]]:
    """Return how host memory is registered with a type of device, and unregistered."""
    module: Any = module_of(device)
    if device.type == "cuda":
        runtime = torch.cuda.cudart()
        if runtime is None:
            return []

        def register(address: int, size: int) -> None:
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))

        def unregister(address: int) -> None:
            torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

        return [(register, unregister)]
    if hasattr(module, "register_host_memory"):  # a convention: PyTorch has no name for it
        return [(module.register_host_memory, module.unregister_host_memory)]
    return []


def pinned_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return new pinned host memory of the tensor's size and dtype; None if there is none."""
    del device  # torch pins for the machine's accelerator
    pinned = pinned_bytes(tensor.numel() * tensor.element_size())
    return None if pinned is None else pinned.view(tensor.dtype).view(tensor.shape)


def pinned_bytes(size: int) -> torch.Tensor | None:
    """Return new pinned host memory; None if there is none."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no memory may be locked, or the device has no pinned memory
        return None


# -- random numbers -------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed the generators of all devices, if this process uses any."""
    if (kind := _started()) is not None:
        module_of(kind).manual_seed_all(seed)


def random_states() -> list[torch.Tensor]:
    """Return the states of the default generators of all devices; empty if none is in use."""
    kind = _started()
    if kind is None:
        return []
    module = module_of(kind)
    return [
        module.get_rng_state(torch.device(kind, index))
        for index in range(torch.accelerator.device_count())
    ]


def set_random_states(states: list[torch.Tensor]) -> bool:
    """Set the states of all devices; return False if this machine has another number of them."""
    kind = accelerator()
    if kind is None or len(states) != torch.accelerator.device_count():
        return False
    module = module_of(kind)
    for index, state in enumerate(states):
        module.set_rng_state(state, torch.device(kind, index))
    return True


def random_state_of(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator, the CPU's included."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = module_of(device).get_rng_state(device)
    return state


def set_random_state_of(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's default generator, the CPU's included."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        module_of(device).set_rng_state(state, device)


# -- memory figures -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device's memory, as PyTorch's allocator counts them."""

    allocated: int
    peak: int


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory that this process uses on a device; None if the device does not count."""
    module = module_of(device) if device.type != "cpu" else None
    allocated = getattr(module, "memory_allocated", None)
    peak = getattr(module, "max_memory_allocated", None)
    if allocated is None or peak is None:
        return None
    return DeviceMemory(int(allocated(device)), int(peak(device)))


def peak_memory_of(device: torch.device) -> int | None:
    """Return the most bytes that this process has used on a device; None if it does not count.

    Half of `memory_of`: torch makes a dict of all its figures in each call.
    """
    peak = getattr(module_of(device), "max_memory_allocated", None)
    return None if peak is None else int(peak(device))
