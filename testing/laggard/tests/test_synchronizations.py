"""The counter of host synchronisations: hidden ones are found, asynchronous code has none."""

from __future__ import annotations

import pytest
import torch

import laggard

HIDDEN = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu(),
    "print": lambda x: repr(x),
    "pageable": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "upload": lambda x: torch.ones(4).pin_memory().to(x.device),
    "is_nonfinite": lambda x: torch.isfinite(x).all().item(),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_synchronisation_is_counted_with_its_line(laggard_device, name):
    x = torch.ones(4, device=laggard_device)
    laggard.take_synchronizations()
    HIDDEN[name](x)
    found = laggard.take_synchronizations()
    assert found
    assert all(f"{__file__}:" in sync.stack for sync in found)


def test_explicit_waits_have_their_names(laggard_device):
    event = torch.Event(laggard_device)
    event.record()
    event.synchronize()
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    reasons = [sync.reason for sync in laggard.take_synchronizations()]
    assert reasons == ["Event.synchronize", "Stream.synchronize", "synchronize"]


def test_a_step_with_offloaded_gradients_needs_none(laggard_device):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]).to(laggard_device)
    update = torch.optim.AdamW(model.parameters(), 0.01)
    batch = torch.ones(4, 8).pin_memory()
    buffers = {p: torch.empty(p.shape, pin_memory=True) for p in model.parameters()}
    side, done = torch.Stream(laggard_device), torch.Event(laggard_device)

    def offload(parameter: torch.Tensor) -> None:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            buffers[parameter].copy_(parameter.grad, non_blocking=True)
        parameter.grad.record_stream(side)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(offload)
    laggard.take_synchronizations()
    model(batch.to(laggard_device, non_blocking=True)).square().mean().backward()
    done.record(side)
    update.step()
    update.zero_grad()
    assert not laggard.take_synchronizations()
    done.synchronize()
    assert all(torch.isfinite(buffer).all() for buffer in buffers.values())
    assert [sync.reason for sync in laggard.take_synchronizations()] == ["Event.synchronize"]
