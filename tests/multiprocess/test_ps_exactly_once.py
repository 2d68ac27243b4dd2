"""A request that is sent again is answered again, in the same words, and applied once.

The requests are made by hand here and sent over a real line, twice with the same number; whoever
lost an answer would do the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.ps import connection as framed
from paceline.ps import messages as m
from paceline.ps.client import session
from paceline.ps.client.remote_array import RemoteArray
from support import run_ranks


def send(link, request: m.AnyRequest) -> None:
    link._fixed.send(request, ())


def answers(link, seq: int, count: int) -> list[m.Reply]:
    replies = []
    for _ in range(count):
        frame = np.empty(framed.FRAME_BYTES, dtype=np.uint8)
        link._fixed._pair.receive_frame(frame, framed.reply_tag(seq)).wait()
        replies.append(framed.read_reply(frame, None))
    return replies


def repeat(group, pace):
    client = pl.ps.Client(pace)
    client.init("w", np.zeros(4, np.float32), lr=1.0)
    (link,) = session.current().links
    table = session.current().keys["w"].remote.table_on(link)
    grad = pl.empty(4).fill_(1.0)
    where = link.locate(grad)
    seen = []
    for step in (1, 2):
        push, commit = link._seq + 1, link._seq + 2
        link._seq += 2
        # Everything twice, and the push once more behind the commit that ended its step.
        for seq in (push, push, commit, commit, push):
            if seq == push:
                send(link, m.Push(seq, table, 0, step, where, "float32"))
            else:
                send(link, m.Commit(seq, table, step, reads=False))
        if pace == "ps":  # a push is answered when all have pushed; then a repeated one can be
            seen.append(answers(link, push, 1)[0])
        first, *again = answers(link, commit, 2)
        assert again == [first] and not first.error
        seen.append(first)
    # A very late copy of the first commit is answered as it was then.
    send(link, m.Commit(seen[pace == "ps"].seq, table, 1, reads=False))
    assert answers(link, seen[pace == "ps"].seq, 1) == [seen[pace == "ps"]]
    return client.pull("w").wait().tolist(), client.version("w"), seen[-1].version


@pytest.mark.parametrize("pace", ["async", "ps"])
def test_a_repeated_request_is_answered_and_not_applied(pace):
    ((values, version, told),) = run_ranks(1, repeat, pace, servers=1)
    assert values == [-2.0] * 4
    assert version == told == 2


def repeat_an_open(group):
    client = pl.ps.Client("async")
    client.init("w", np.zeros(4, np.float32), lr=1.0)
    (link,) = session.current().links
    spec = session.current().keys["w"].spec
    fresh = type(spec)("v", spec.shape, spec.dtype, spec.workers, spec.optimizer, spec.rule)
    (table,) = RemoteArray(session.current(), fresh).specs.values()
    link._seq += 1
    request = m.Open(link._seq, table, (m.WorkerBuffer(),))
    for _ in range(2):
        send(link, request)
    first, again = answers(link, request.seq, 2)
    assert first == again and first.is_new  # as if nothing had been lost
    assert client.keys() == ["v", "w"]
    # An answer that carried an error is repeated too.
    link._seq += 1
    for _ in range(2):
        send(link, m.Commit(link._seq, 77, 1))
    errors = answers(link, link._seq, 2)
    assert errors[0] == errors[1] and errors[0].error == "UnknownKey"
    return torch.is_tensor(client.pull("w").wait())


def test_a_repeated_open_makes_one_table_and_errors_are_repeated():
    assert run_ranks(1, repeat_an_open, servers=1) == [False]
