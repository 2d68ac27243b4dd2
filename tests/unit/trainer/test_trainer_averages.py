"""Means weighted by samples, and the progress of a Trainer."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.trainer.evaluation import Averages
from paceline.trainer.saving import FitProgress

numbers = st.floats(-100, 100)


@given(st.lists(st.lists(st.tuples(numbers, st.integers(0, 9)), max_size=4), max_size=4))
def test_the_sums_of_workers_give_the_mean_over_all_samples(workers):
    numbers = []
    for batches in workers:
        averages = Averages(["loss", "twice"])
        for value, samples in batches:
            averages.add({"loss": value, "twice": 2 * value}, samples)
        numbers.append(averages.numbers)
    added = [sum(column) for column in zip(*numbers, strict=True)] if numbers else [0.0, 0.0, 0.0]
    means = Averages(["loss", "twice"]).means_of(added)
    every = [value for batches in workers for value, count in batches for _ in range(count)]
    if every:
        assert math.isclose(means["loss"], sum(every) / len(every), rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(means["twice"], 2 * means["loss"], rel_tol=1e-9, abs_tol=1e-9)
    else:
        assert math.isnan(means["loss"]) and math.isnan(means["twice"])


def test_a_batch_that_does_not_count_changes_nothing_even_if_it_is_nan():
    averages = Averages(["loss"])
    averages.add({"loss": 2.0}, 3)
    averages.add({"loss": math.nan}, 0)
    assert averages.means_of(averages.numbers) == {"loss": 2.0}


def test_sums_go_on_from_numbers():
    first, second = Averages(["loss"]), Averages(["loss"])
    first.add({"loss": 1.0}, 2)
    second.numbers = first.numbers
    second.add({"loss": 4.0}, 1)
    assert second.means_of(second.numbers) == {"loss": 2.0}


def test_a_fit_that_was_under_way_keeps_its_first_epoch():
    before = FitProgress()
    before.begin_fit(1)
    before.epochs = 4
    before.begin_fit(2)
    before.epochs = 6
    after = FitProgress()
    after.load_state_dict(before.state_dict())
    after.begin_fit(1)
    after.begin_fit(2)
    assert (after.first_epoch, after.epochs) == (4, 6)
    after.begin_fit(3)
    assert after.first_epoch == 6


def test_sums_of_a_living_peer_are_not_taken_over():
    peer, newcomer = FitProgress(keeps_sums=False), FitProgress(keeps_sums=False)
    peer.sums, peer.batches, peer.history = [3.0, 4.0], 7, [{"epoch": 0, "loss": 1.0}]
    newcomer.load_state_dict(peer.state_dict())
    assert newcomer.sums == [] and newcomer.batches == 7 and newcomer.history == peer.history
    resumed = FitProgress()
    resumed.load_state_dict({**peer.state_dict(), "keeps_sums": True})
    assert resumed.sums == [3.0, 4.0]


def test_an_epoch_has_one_row():
    progress = FitProgress()
    progress.record({"epoch": 0, "loss": 1.0})
    progress.record({"epoch": 1, "loss": 0.5})
    progress.record({"epoch": 1, "loss": 0.25})
    assert progress.history == [{"epoch": 0, "loss": 1.0}, {"epoch": 1, "loss": 0.25}]
