"""ps[wait=layer]: a step returns at once, and every layer waits for its own parameters."""

import time

import pytest
import torch

import paceline as pl
from support import run_ranks


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 40), torch.nn.Linear(40, 1)
    )


def _train(group, pace: str, kind: str):
    model = _model()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, optimizer, pace=pace, bucket_mb=0.01)
    batches = torch.Generator().manual_seed(pl.rank())
    for step in range(6):
        model(torch.randn(32, 20, generator=batches)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != 3:  # a step that is left out
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            shown = model(torch.ones(1, 20)).item()
    state = optimizer.state_dict()["state"]
    return [value.clone() for value in model.state_dict().values()], state, shown


@pytest.mark.parametrize("hosts", [1, [0, 1, 0, 1]])
@pytest.mark.parametrize("kind", [pytest.param("SGD", marks=pytest.mark.slow), "AdamW"])
def test_waiting_by_layer_changes_no_bit(kind, hosts):
    expected = run_ranks(2, _train, "allreduce", kind)
    found = run_ranks(2, _train, "ps[wait=layer]", kind, servers=2, hosts=hosts)
    for (params, state, shown), (other, other_state, other_shown) in zip(
        expected, found, strict=True
    ):
        assert all(map(torch.equal, params, other))
        assert shown == other_shown
        assert state.keys() == other_state.keys()
        for number, entries in state.items():
            for key, value in entries.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(other_state[number][key])
                )


def test_a_step_returns_before_the_others_have_ended_theirs():
    def body(group):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = pl.distribute(
            model, optimizer, pace="ps[wait=layer]", buffers="local", bucket_mb=0.01
        )
        model(torch.ones(4, 20)).sum().backward()
        note = torch.zeros(1)
        if pl.rank() == 0:
            optimizer.step()  # would not come back if it waited for rank 1's
            group.send(note, 1)
        else:
            group.recv(note, 0)
            optimizer.step()
        model(torch.ones(4, 20))  # waits, layer by layer
        return [param.detach().clone() for param in model.parameters()]

    one, other = run_ranks(2, body, servers=1)
    assert all(map(torch.equal, one, other))


def test_agreed_values_have_arrived():
    def body(group):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pl.distribute(model, optimizer, pace="ps[wait=layer]", bucket_mb=0.01)
        model(torch.ones(4, 20)).sum().backward()
        note = torch.zeros(1)
        if pl.rank() == 0:
            optimizer.step()
            group.send(note, 1)
        else:
            group.recv(note, 0)
            time.sleep(0.2)  # rank 0 has asked by now, and its values have not arrived
            optimizer.step()
        with model.agreed():
            values = [param.detach().clone() for param in model.parameters()]
        model(torch.ones(4, 20))  # waits, layer by layer
        return all(map(torch.equal, values, model.parameters()))

    assert run_ranks(2, body, servers=1) == [True, True]


def test_a_copy_of_the_model_waits_for_nobody():
    def body(group):
        import copy

        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = pl.distribute(model, optimizer, pace="ps", wait="layer")
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()
        model.pull()
        twin = copy.deepcopy(model)
        assert torch.equal(twin(torch.ones(1, 20)), model(torch.ones(1, 20)))
        return True

    assert all(run_ranks(2, body, servers=1))
