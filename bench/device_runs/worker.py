"""One worker of bench/devices.py: trains on the test device and measures. Prints one JSON line."""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import TASKS

import laggard
import paceline as pl
from device_runs.pipeline import Trip, best_end_ms, bucket_ready_ms, hidden_share
from laggard import _C
from paceline.comm.device_group import DeviceGroup
from paceline.pace import device_allreduce

LINK_GB_S = 5.0  # the exchange between two workers, in simulated time
# NCCL's call: three events and a launch. The test device's backend is a thread of Python.
COLLECTIVE_US = 25.0
MODEL = {"copy_gb_s": 12.0, "copy_us": 10.0, "kernel_us": 3.0, "launch_us": 5.0, "host_speed": 0.0}


class OnLink:
    """A host exchange that takes the time of a link, one bucket after the other."""

    free_ms = 0.0  # when the link has no bucket any more

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.traits = inner.traits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, bucket: Any, step: int) -> Any:
        handle = self._inner.submit(bucket, step)
        size = bucket.grads.numel() * bucket.grads.element_size()
        begin = max(laggard.host_clock_ms(), OnLink.free_ms)
        OnLink.free_ms = begin + size / (LINK_GB_S * 1e6)
        return Until(handle, OnLink.free_ms)


class Until:
    """A handle that ends at a simulated time."""

    def __init__(self, handle: Any, end_ms: float) -> None:
        self._handle, self._end_ms = handle, end_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def wait(self, timeout_s: float | None = None) -> Any:
        value = self._handle.wait(timeout_s)
        laggard.spend_host_time(max(0.0, self._end_ms - laggard.host_clock_ms()))
        return value


def put_on_link() -> None:
    """Let every exchange through host memory take the time of the link."""
    make = device_allreduce.HostStaged.__init__

    def with_link(self: Any, group: Any, route: Any, inner: Any, **more: Any) -> None:
        make(self, group, route, OnLink(inner), **more)

    device_allreduce.HostStaged.__init__ = with_link  # type: ignore[method-assign]


class Training:
    """A model on the device, plain or distributed."""

    def __init__(self, task_name: str, pace: str | None) -> None:
        torch.manual_seed(0)
        self.task = TASKS[task_name]
        device = pl.device()
        self.model = self.task.model().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if pace:
            self.model, self.optimizer = pl.distribute(self.model, self.optimizer, pace=pace)
        self.x, self.y = (part.to(device) for part in self.task.make_batch(self.task.batch))
        self.gradient_times: list[tuple[torch.Event, int]] = []
        self.autograd_threads: dict[int, int] = {}  # by native id: the identity

    def step(self) -> tuple[torch.Event, torch.Event, torch.Event]:
        """Train one step; return events before backward, after it, and after the update."""
        events = [torch.Event(pl.device(), enable_timing=True) for _ in range(3)]
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(self.x), self.y)
        events[0].record()
        loss.backward()
        events[1].record()
        self.optimizer.step()
        events[2].record()
        return events[0], events[1], events[2]

    def watch_gradients(self) -> None:
        """Note when each gradient is there, and which thread computes backward."""

        def hook(parameter: torch.Tensor) -> None:
            self.autograd_threads[threading.get_native_id()] = threading.get_ident()
            event = torch.Event(parameter.device, enable_timing=True)
            event.record(torch.accelerator.current_stream(parameter.device))
            self.gradient_times.append((event, parameter.numel() * parameter.element_size()))

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)


def finish() -> None:
    """Wait for the device without being counted."""
    _C.set_counted(False)
    torch.accelerator.synchronize(pl.device())
    _C.set_counted(True)


def overlap(pace: str, tera_flops: float) -> dict[str, Any]:
    """Compare steps with and without exchange in simulated time."""
    plain, distributed = Training("mlp", None), Training("mlp", pace)
    plain.watch_gradients()
    for training in (plain, distributed):
        for _ in range(2):  # buckets settle in the first steps
            training.step()
    finish()
    plain.gradient_times.clear()
    with laggard.simulated_time(**MODEL, tera_flops=tera_flops, link_gb_s=LINK_GB_S):
        begin, middle, end = plain.step()
        finish()
        backward_ms, plain_ms = begin.elapsed_time(middle), begin.elapsed_time(end)
        gradients = [(begin.elapsed_time(at), size) for at, size in plain.gradient_times]
    pl.world().barrier()
    OnLink.free_ms = 0.0
    with laggard.simulated_time(**MODEL, tera_flops=tera_flops, link_gb_s=LINK_GB_S):
        begin, _, end = distributed.step()
        finish()
        exposed_ms = begin.elapsed_time(end) - plain_ms
        spans = [s for s in laggard.take_timeline() if s.stream and s.bytes > 1000]
    outward = sorted((s for s in spans if s.op == "copy device to host"), key=_begin)
    inward = sorted((s for s in spans if s.op == "copy host to device"), key=_begin)
    ready = bucket_ready_ms(gradients, [int(s.bytes) for s in outward])
    trips = [
        Trip(at, _length(out), out.bytes / (LINK_GB_S * 1e6), _length(back))
        for at, out, back in zip(ready, outward, inward, strict=True)
    ]
    return {
        "backward_ms": backward_ms,
        "busy_ms": sum(trip.busy_ms for trip in trips),
        "buckets": len(trips),
        "exposed_ms": exposed_ms,
        "best_exposed_ms": max(0.0, best_end_ms(trips) - backward_ms),
        "hidden_share": hidden_share(trips, backward_ms, exposed_ms),
    }


def _begin(span: Any) -> float:
    return float(span.begin_ms)


def _length(span: Any) -> float:
    return float(span.end_ms - span.begin_ms)


class Collectives:
    """The host time inside of the device's own backend, its launches included."""

    own_ms = 0.0
    calls = launches = 0

    @classmethod
    def watch(cls) -> None:
        """Measure each all-reduce from now on."""
        call = DeviceGroup.all_reduce

        def all_reduce(group: DeviceGroup, tensor: torch.Tensor) -> Any:
            thread = threading.get_ident()
            (inside_ms, launches), began_s = laggard.host_use(thread), time.thread_time()
            work = call(group, tensor)
            used_ms = (time.thread_time() - began_s) * 1e3
            now_ms, now_launches = laggard.host_use(thread)
            cls.own_ms += used_ms - (now_ms - inside_ms)
            cls.launches += now_launches - launches
            cls.calls += 1
            return work

        DeviceGroup.all_reduce = all_reduce  # type: ignore[method-assign]


@dataclass(frozen=True)
class HostTime:
    """Processor time of the script's thread and autograd's, and how much of it is the device's."""

    used_ms: float
    inside_ms: float  # of the device, and of its backend
    launches: int
    collectives: int

    @classmethod
    def now(cls, threads: dict[int, int]) -> HostTime:
        """`threads`: by native id, the identity."""
        used_ms = 0.0
        for native in threads:
            spent = Path(f"/proc/self/task/{native}/schedstat").read_text().split()[0]
            used_ms += int(spent) / 1e6
        inside = [laggard.host_use(ident) for ident in threads.values()]
        inside_ms = sum(ms for ms, _ in inside) + Collectives.own_ms
        launches = sum(count for _, count in inside) - Collectives.launches
        return cls(used_ms, inside_ms, launches, Collectives.calls)

    def since(self, before: HostTime) -> HostTime:
        return HostTime(
            self.used_ms - before.used_ms,
            self.inside_ms - before.inside_ms,
            self.launches - before.launches,
            self.collectives - before.collectives,
        )

    @property
    def modelled_ms(self) -> float:
        """Return the time with usual costs of launches and collectives, not the test device's."""
        calls_us = self.launches * MODEL["launch_us"] + self.collectives * COLLECTIVE_US
        return self.used_ms - self.inside_ms + calls_us / 1e3


def hooks(pace: str, rounds: int) -> dict[str, Any]:
    """Compare the host time of steps with and without exchange, 500 tensors, in turns."""
    plain, distributed = Training("stack", None), Training("stack", pace)
    plain.watch_gradients()
    plain.step()
    threads = {threading.get_native_id(): threading.get_ident(), **plain.autograd_threads}
    plain = Training("stack", None)  # without our own hooks
    times: dict[str, list[HostTime]] = {"plain": [], "distributed": []}
    _C.set_stacks(False)
    _C.set_race_mode("off")
    Collectives.watch()
    with laggard.simulated_time():
        for number in range(rounds + 3):
            for name, training in (("plain", plain), ("distributed", distributed)):
                finish()
                before = HostTime.now(threads)
                training.step()
                if number >= 3:
                    times[name].append(HostTime.now(threads).since(before))
    modelled = {k: statistics.median(t.modelled_ms for t in found) for k, found in times.items()}
    least = {k: min(t.modelled_ms for t in found) for k, found in times.items()}
    used = {k: statistics.median(t.used_ms for t in found) for k, found in times.items()}
    launches = {k: statistics.median(t.launches for t in found) for k, found in times.items()}
    return {
        "tensors": len(list(plain.model.parameters())),
        "plain_ms": modelled["plain"],
        "added_ms": modelled["distributed"] - modelled["plain"],
        "added_least_ms": least["distributed"] - least["plain"],
        "added_launches": launches["distributed"] - launches["plain"],
        "added_with_test_device_ms": used["distributed"] - used["plain"],
    }


def waits(pace: str, rounds: int) -> dict[str, Any]:
    """Count waits of the script's and autograd's threads for the device, with their stacks."""
    training, others = Training("mlp", pace), set()
    hidden: list[Any] = []
    idents: set[int] = {threading.get_ident()}
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: idents.add(threading.get_ident()))
    for _ in range(2):
        training.step()
    finish()
    laggard.take_synchronizations()
    for _ in range(rounds):
        training.step()
    for sync in laggard.take_synchronizations():
        if sync.thread in idents:
            hidden.append(sync)
        else:
            others.add(sync.reason)
    return {
        "waits_per_step": len(hidden) / rounds,
        "stacks": sorted({sync.stack for sync in hidden})[:3],
        "on_other_threads": sorted(others),
    }


def memory(pace: str) -> dict[str, Any]:
    """Return the pinned memory beyond buckets, in bytes and in buckets."""
    before = torch.laggard.host_memory_stats()["allocated_bytes.current"]
    training = Training("mlp", pace)
    for _ in range(3):
        training.step()
    finish()
    peak = torch.laggard.host_memory_stats()["allocated_bytes.peak"] - before
    # A tensor that is larger than a bucket has one of its own.
    largest = max(p.numel() * p.element_size() for p in training.model.parameters())
    return {"pinned_bytes": peak, "pinned_buckets": peak / max(largest, 16 << 20)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("hooks", "overlap", "waits", "memory"))
    parser.add_argument("--pace", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tera-flops", type=float, default=0.5)
    parser.add_argument("--staged", action="store_true", help="as if no memory can be registered")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.staged:
        del torch.laggard.register_host_memory
    if options.part == "overlap":
        put_on_link()
    _C.set_delay(0, 0)
    pl.init()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "hooks": lambda: hooks(options.pace, options.rounds),
        "overlap": lambda: overlap(options.pace, options.tera_flops),
        "waits": lambda: waits(options.pace, options.rounds),
        "memory": lambda: memory(options.pace),
    }
    found = parts[options.part]()
    if pl.rank() == 0:
        print(f"FOUND {json.dumps(found)}", flush=True)
    pl.world().barrier()


if __name__ == "__main__":
    main()
