"""Three ways of getting a gradient into its bucket, in one process without any exchange.

    python bench/gradient_memory.py [--model mlp] [--rounds 12]

    fresh      autograd allocates the gradient and keeps it: what a plain script does (no bucket)
    zeroed     param.grad is a zeroed view of the bucket, to which autograd adds the fresh gradient
    copied     the fresh gradient is copied into the bucket and freed at once
    direct     large linear layers compute their weight gradient in the bucket, others are copied

each with malloc as it comes and with freed memory kept. Wall time and CPU time of forward and
backward; the ways take turns, one step each per round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from models import TASKS

import paceline as pl
from paceline import _core
from paceline.comm.shared_memory import allocate
from paceline.data_parallel.bucket import Bucket, NamedParameter
from paceline.data_parallel.direct_gradients import compute_in_bucket
from paceline.runtime import job

WAYS = ("fresh", "zeroed", "copied", "direct")


class Always:
    is_syncing = True


def make(way: str, name: str) -> Callable[[], None]:
    """Return one step, forward and backward, whose gradients end up in a bucket in that way."""
    torch.manual_seed(0)
    task = TASKS[name]
    model, ((inputs, targets),) = task.model(), task.batches(1)
    engine = job.current().fabric.engine
    named = [NamedParameter(n, p) for n, p in model.named_parameters()]

    def memory(count: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(engine, (count,), dtype)

    bucket = Bucket(0, named, allocate=memory, allocate_params=memory, first_slot=0)
    slots = {slot.param: slot for slot in bucket.slots}
    if way in ("copied", "direct"):
        for slot in bucket.slots:
            slot.param.register_post_accumulate_grad_hook(lambda _, slot=slot: bucket.take(slot))
    if way == "direct":
        compute_in_bucket(model, slots, Always())

    def step() -> None:
        model.zero_grad()
        if way == "zeroed":
            bucket.grads.zero_()
            for slot in bucket.slots:
                slot.param.grad = slot.grad
        task.loss(model(inputs), targets).backward()
        if way in ("copied", "direct"):
            bucket.flush()
            bucket.begin()

    return step


def measure(name: str, rounds: int) -> None:
    steps = {way: make(way, name) for way in WAYS}
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 2):
        for way, step in steps.items():
            start, used = time.perf_counter(), time.process_time()
            step()
            if number >= 2:
                wall[way].append(time.perf_counter() - start)
                cpu[way].append(time.process_time() - used)
    for way in WAYS:
        print(f"  {way:8} wall {_figures(wall[way])}   CPU {_figures(cpu[way])}   (ms)")


def _figures(times: list[float]) -> str:
    return f"{min(times) * 1e3:7.1f} min {statistics.median(times) * 1e3:7.1f} median"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(TASKS), default="mlp")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", choices=("no", "yes"), help="one malloc setting only")
    options = parser.parse_args()
    if options.keep is None:  # the setting is for good, so each has a process of its own
        for keep in ("no", "yes"):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--keep", keep], check=True)
        return
    torch.set_num_threads(1)
    if options.keep == "yes" and not _core.keep_freed_memory():
        sys.exit("this malloc has no setting that keeps freed memory")
    pl.init()
    print(f"{options.model}, freed memory kept: {options.keep}")
    measure(options.model, options.rounds)


if __name__ == "__main__":
    main()
