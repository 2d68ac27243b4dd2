"""The hook of a small parameter, which is in the core: what it counts, and when it asks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline import _core


class Thing:
    """A bucket, a slot or the streams of a bucket."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def make(*, streams: Thing | None = None, missing: int = 2) -> tuple[Thing, list[Any], Any]:
    bucket, called = Thing(is_open=True, missing=missing), list[Any]()
    slot = Thing(bucket=bucket, ready=False)

    def on_ready(slot: Thing, param: Any) -> None:
        called.append((slot, param))

    return slot, called, _core.ReadyHook(slot, on_ready, lambda: called.append("full"), streams)


def test_it_counts_and_submits_a_full_bucket():
    slot, called, hook = make()
    hook("param")
    assert (slot.ready, slot.bucket.missing, called) == (True, 1, [])
    slot.ready = False
    hook("param")
    assert (slot.ready, slot.bucket.missing, called) == (True, 0, ["full"])


def test_other_cases_are_for_python():
    slot, called, hook = make()
    slot.bucket.is_open = False
    hook("closed")
    slot.bucket.is_open, slot.ready = True, True
    hook("second")
    assert called == [(slot, "closed"), (slot, "second")] and slot.bucket.missing == 2


def test_streams_are_noted_by_their_number():
    one, other = Thing(stream_id=3), Thing(stream_id=4)
    turns = iter([one, one, other])
    streams = Thing(current=lambda: next(turns), seen={})
    slot, _, hook = make(streams=streams, missing=9)
    for _ in range(3):
        slot.ready = False
        hook("param")
    assert streams.seen == {3: one, 4: other}


def test_errors_reach_the_caller_and_cycles_are_collected():
    slot, _, hook = make(missing=1)
    del slot.ready
    with pytest.raises(AttributeError, match="ready"):
        hook("param")
    with pytest.raises(TypeError, match="takes the parameter"):
        hook()
    slot.hook = hook  # as a parameter's hooks
    gone = weakref.ref(slot)
    del slot, hook, _
    gc.collect()
    assert gone() is None


def test_autograd_calls_it():
    param = nn.Parameter(torch.ones(3))
    slot, called, hook = make(missing=1)
    param.register_post_accumulate_grad_hook(hook)
    (param * 2).sum().backward()
    assert slot.ready and called == ["full"]
