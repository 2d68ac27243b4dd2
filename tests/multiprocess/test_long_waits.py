"""Waiting longer than the limit of liveness for somebody who lives is no error."""

import time

import torch

import paceline as pl
from support import run_ranks, started

# A process that gets no core for so long does count as dead.
LIMITS = {"PACELINE_LIVENESS_S": "3", "PACELINE_WARN_S": "0.5"}
LONG_S = 5.0


def test_a_neighbour_that_has_nothing_to_say_is_not_taken_for_dead():
    def body(group):
        note = torch.zeros(1)
        if group.rank == 0:
            group.send(note, 1)  # the channel exists from here on
            time.sleep(LONG_S)
            group.send(note, 1)
        else:
            group.recv(note, 0)
            group.recv(note, 0)
        return True

    assert all(run_ranks(2, body, env=LIMITS))


def test_a_worker_waits_for_a_slow_one_through_servers_and_says_so():
    def body(group):
        model = torch.nn.Linear(4, 1)
        model, optimizer = pl.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), pace="ps", buffers="local"
        )
        for step in range(3):
            if group.rank == 1 and step == 1:
                time.sleep(LONG_S)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return True

    with started(2, body, servers=1, env=LIMITS) as ranks:
        assert ranks.values()[:2] == [True, True]
        said = ranks.output(0)
    assert "rank 0 waits for server 0 to answer its push" in said
    assert "uint8" not in said  # the engine's own words would be of frames and tags
