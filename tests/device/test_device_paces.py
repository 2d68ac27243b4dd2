"""Every pace that goes through host memory, on the test device: the bits of the CPU, and no race.

One job trains many small models, each at another pace. The script's thread never waits for the
device: only the errand threads do.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from support.devices import load_device, require_no_wait_of_the_script, run_on_device
from support.ranks import run_ranks

STEPS = 5


def network() -> nn.Module:
    torch.manual_seed(7)
    first = nn.Sequential(nn.Linear(24, 160), nn.ReLU(), nn.BatchNorm1d(160))
    return nn.Sequential(first, nn.Linear(160, 90), nn.Tanh(), nn.Linear(90, 5))


def train(rank: int, device: str, pace: str, **options: Any) -> list[torch.Tensor]:
    """Train for some steps; return what the workers agree on, and this worker's optimizer state."""
    model = network().to(device)
    momentum = 0.9 if "async" not in pace else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    clips = options.pop("clips", False)
    pl.distribute(model, optimizer, pace=pace, bucket_mb=0.03, **options)
    laggard = load_device() if device != "cpu" else None
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        images, labels = torch.randn(6, 24).to(device), torch.randint(0, 5, (6,)).to(device)
        if laggard is not None:
            torch.accelerator.synchronize()
            laggard.take_synchronizations()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if laggard is not None and "@" not in pace:  # a change of pace may wait
            require_no_wait_of_the_script(laggard)
    with model.agreed():
        values = [t.detach().cpu().clone() for t in model.parameters()]
    state = optimizer.state_dict()["state"]
    return values + [state[n]["momentum_buffer"].cpu() for n in sorted(state) if momentum]


AMONG_WORKERS: dict[str, dict[str, Any]] = {
    "local:2": {},
    "local:2[compress=topk:0.3(min=100)]": {},
    "post_local:2": {"after": 2},
    "bmuf:2": {},
    "diloco:2[fragments=2]": {},
    "diloco:4[delay=1,late=shift]": {},
    "easgd:2": {},
    "eamsgd:2": {},
    "gossip:ring": {},
    "bitmap[momentum=0.5]": {},
    "bitmap[feedback=yes]": {},
    "partial:0.5[carry=yes]": {},
    "local:2@0,allreduce@3": {},
    "allreduce[compress=int8(min=100,feedback=yes)]": {},
    "allreduce[compress=fp16]": {},
    "allreduce[compress=bf16(min=100,feedback=yes)]": {},
    "allreduce[compress=onebit(min=100)]": {},
    "allreduce[compress=bf16(min=100)]": {},
    "allreduce[compress=int8(min=100)]": {"clips": True},
    "allreduce[compress=topk:0.1(min=100)]": {},
    "allreduce[compress=powersgd:2(min=100)]": {"clips": True},  # on the device
    "allreduce[compress=powersgd:2(min=100),via=host]": {},
}
ON_DEVICE = {"allreduce[compress=powersgd:2(min=100)]": 1e-5}  # products are added in another order
THROUGH_SERVERS: dict[str, dict[str, Any]] = {
    "ps": {},
    "ps[wait=layer]": {"clips": True},
    "ps[compress=int8(min=100)]": {},
    "ps@0,local:2@2,ps@4": {},
    "diloco:2": {},
    "bitmap": {},
}
ONE_WORKER: dict[str, dict[str, Any]] = {  # several would be a matter of luck
    "async": {"clips": True},
    "async[push=delta]": {},
    "async[compress=topk:0.3(min=100)]": {},
    "ssp:2": {},
    "ssp:1[unit=version]": {},
    "easgd:2[mode=async]": {},
}


def every_pace(world, device: str, paces: dict[str, dict[str, Any]]):
    warnings.simplefilter("ignore")
    where = str(pl.device()) if device != "cpu" else "cpu"
    return {pace: train(world.rank, where, pace, **options) for pace, options in paces.items()}


JOBS = [(2, 0, AMONG_WORKERS), (2, 2, THROUGH_SERVERS), (1, 1, ONE_WORKER)]


@pytest.fixture(scope="module", params=JOBS, ids=["workers", "servers", "one worker"])
def job(request) -> tuple[Any, ...]:
    """A job, and what its workers find on the CPU."""
    workers, servers, paces = request.param
    return *request.param, run_ranks(workers, every_pace, "cpu", paces, servers=servers)


def test_paces_have_the_bits_of_the_cpu(job, schedule):
    workers, servers, paces, right = job
    found = run_on_device(
        workers, every_pace, "laggard", paces, schedule=schedule, servers=servers, timeout_s=200
    )
    for of_rank, expected in zip(found, right, strict=True):
        for pace, values in expected.items():
            tolerance = ON_DEVICE.get(pace, 0.0)
            torch.testing.assert_close(
                of_rank[pace],
                values,
                rtol=0,
                atol=tolerance,
                msg=lambda text, pace=pace: f"{pace}: {text}",
            )
