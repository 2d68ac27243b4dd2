"""What servers cannot do is refused before training, with the same words on all ranks."""

import warnings

import pytest
import torch

import paceline as pl
from paceline.errors import UsageError
from support import run_ranks


class SGD(torch.optim.SGD):
    """A class of the script's own, with the name of one that servers know."""


class Own(torch.optim.Optimizer):
    """A class that servers do not know."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        pass


def _refusal(*arguments, **options) -> str:
    with pytest.raises(UsageError) as caught:
        pl.distribute(*arguments, **options)
    return str(caught.value)


def _try_all(group) -> dict[str, str]:
    linear, words = torch.nn.Linear(4, 2), torch.nn.Embedding(5, 4, sparse=True)
    half = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return {
        "same name": _refusal(linear, SGD(linear.parameters(), lr=0.1), pace="ps"),
        "unknown": _refusal(linear, Own(linear.parameters()), pace="async"),
        "sparse": _refusal(words, torch.optim.SGD(words.parameters(), lr=0.1), pace="ssp:2"),
        "missing": _refusal(half, torch.optim.SGD(half[0].parameters(), lr=0.1), pace="ps"),
        "option": _refusal(
            linear, torch.optim.SGD(linear.parameters(), lr=0.1), pace="ps", update="sharded"
        ),
        "number": _refusal(
            linear, torch.optim.SGD(linear.parameters(), lr=0.1), pace="async", max_staleness=1.5
        ),
        "buffers": _refusal(
            linear, torch.optim.SGD(linear.parameters(), lr=0.1), pace="async", buffers="average"
        ),
    }


def test_refusals_are_alike_on_all_ranks():
    one, other = run_ranks(2, _try_all, servers=1)
    assert one == other
    assert (
        "test_ps_refusals.SGD, and servers run the optimizers of torch.optim only"
        in (one["same name"])
    )
    assert "'Own' is none of them" in one["unknown"]
    assert "weight has sparse gradients" in one["sparse"]
    assert "1.weight is trainable but the optimizer does not have it" in one["missing"]
    assert "pace ps has no option 'update'; it belongs to allreduce" in one["option"]
    assert one["number"] == "distribute: max_staleness=1.5 must be a whole number, 0 or more"
    assert one["buffers"].endswith("buffers='average' is unknown; choose one of local")


def test_without_servers_the_error_says_what_to_type():
    def body(group):
        model = torch.nn.Linear(4, 2)
        return _refusal(model, torch.optim.SGD(model.parameters(), lr=0.1), pace="ssp:3")

    for text in run_ranks(2, body):
        assert "pace ssp:3 needs parameter servers" in text
        assert "paceline run -n 2 -s 1 --pace ssp" in text


def test_an_optimizer_of_the_scripts_own_runs_with_push_delta_and_pushing_params_warns():
    def body(group):
        found = []
        for push in ("delta", "params"):
            model = torch.nn.Linear(4, 2)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model, optimizer = pl.distribute(
                    model, SGD(model.parameters(), lr=0.1), pace="async", push=push
                )
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            found.append([str(warning.message) for warning in caught])
        return found

    first, second = run_ranks(2, body, servers=1)
    assert first[0] == second[0] == second[1] == []
    assert len(first[1]) == 1 and "the last worker to write wins" in first[1][0]


def test_a_pace_from_the_command_line_drops_options_that_it_does_not_have():
    def body(group):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pl.distribute(model, optimizer, pace="allreduce[bucket_mb=2]", buffers="average")
        return True

    assert all(run_ranks(2, body, servers=1, env={"PACELINE_PACE": "async"}))
