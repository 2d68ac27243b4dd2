"""`torch.laggard`: the functions that PyTorch and its users expect in the module of a device."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from laggard import _C

Stream = torch.Stream
Event = torch.Event


def _index(device: Any) -> int:
    """Return the index of a device that is given as an index, a name or a torch.device."""
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _C.current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Do nothing: importing laggard is all that the device needs."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _C.is_in_bad_fork()


def device_count() -> int:
    return _C.DEVICES


def current_device() -> int:
    return _C.current_device()


def set_device(device: Any) -> None:
    _C.set_device(_index(device))


class device:
    """Make a device the current one inside a `with` block."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = _C.current_device()
        _C.set_device(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _C.set_device(self._before)


def synchronize(device: Any = None) -> None:
    _C.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def stream(stream: torch.Stream) -> torch.Stream:
    """Return the stream: a torch.Stream is a context manager."""
    return stream


def manual_seed(seed: int) -> None:
    _C.default_generator(-1).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(_C.DEVICES):
        _C.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = "laggard") -> torch.Tensor:
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "laggard") -> None:
    _C.default_generator(_index(device)).set_state(state)


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


_WHY_NOT = {
    1: "an address and a size above 0 are expected",
    712: "some of its pages are pinned already",
    713: "no registered memory begins at this address",
}


def register_host_memory(address: int, size: int) -> None:
    """Pin memory of another owner, as cudaHostRegister does; RuntimeError if that fails."""
    _require(_C.register_host_memory(address, size), "register", address)


def unregister_host_memory(address: int) -> None:
    """Take back `register_host_memory`. No copy may be in flight."""
    _require(_C.unregister_host_memory(address), "unregister", address)


def _require(status: int, what: str, address: int) -> None:
    if status:
        raise RuntimeError(f"laggard: cannot {what} the memory at {address:#x}: {_WHY_NOT[status]}")


def host_memory_stats() -> dict[str, int]:
    """Return the bytes of pinned memory that this process has allocated: now and at most."""
    current, peak = _C.pinned_bytes()
    return {"allocated_bytes.current": current, "allocated_bytes.peak": peak}
