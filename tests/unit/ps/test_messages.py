"""Frames from anywhere: a message comes out, or BadFrame; nothing else, whatever the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import BadFrame
from paceline.ps import connection as framed
from paceline.ps import messages as m
from paceline.ps.spec import OptimizerSpec, Rule, ShardPiece, ShardSpec, TableSpec

SPEC = TableSpec(
    "model",
    (0, 1),
    (ShardSpec("bucket 0", "float32", 6, (ShardPiece("weight", 0, 0, 0, 6, (2, 3)),)),),
    OptimizerSpec("Adam", ({"lr": 0.1, "betas": [0.9, 0.99], "fused": None},)),
    Rule(bound=3),
)
WHERE = m.Where(1, 7, 64)
REQUESTS = [
    m.Open(
        1, SPEC, (m.WorkerBuffer(WHERE, None),), (m.SharedMemory(WHERE, WHERE),), True, "bfloat16"
    ),
    m.Find(2, "key"),
    m.Assign(3, 0, 0, WHERE, (1, 2)),
    m.Push(4, 0, 0, 1, None, "float32", (0,)),
    m.Replace(5, 0, 0, WHERE),
    m.Commit(6, 0, 1, ({"lr": 0.1},), False, (WHERE,)),
    m.Pull(7, 0, True),
    m.Peek(8, 0, (WHERE,)),
    m.Follow(9, 0, -1, 3),
    m.Unfollow(10, 0, 3),
    m.Keys(11),
    m.FetchState(12, 0, 0),
    m.LoadState(
        13,
        0,
        0,
        (
            m.EncodedStateEntry(0, "exp_avg", None, "float32", (2, 3)),
            m.EncodedStateEntry(0, "step", 1),
        ),
    ),
    m.Stats(14),
    m.Leave(15),
]


def read(frame: np.ndarray, rest: np.ndarray | None) -> m.AnyRequest:
    """Read as a server does: the rest is as long as the frame says."""
    size = framed.rest_bytes(frame)
    return framed.read_request(frame, None if rest is None else np.resize(rest, size))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_a_request_survives_its_frames(request_: m.AnyRequest) -> None:
    assert read(*framed.to_frames(request_)) == request_


def test_a_long_request_survives_its_frames() -> None:
    long = m.Push(4, 0, 0, 1, None, "float32", tuple(range(10_000)))
    frame, rest = framed.to_frames(long)
    assert rest is not None and framed.rest_bytes(frame) == rest.size
    assert read(frame, rest) == long


@given(st.binary(min_size=framed.FRAME_BYTES, max_size=framed.FRAME_BYTES), st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_bad_frame(head: bytes, rest: bytes) -> None:
    frame = np.frombuffer(head, dtype=np.uint8).copy()
    frame[2:4] = 0  # a length that could be
    frame[4] = 1
    try:
        request = read(frame, np.frombuffer(rest, dtype=np.uint8) if rest else None)
    except BadFrame:
        return
    assert isinstance(request, m.AnyRequest)


@given(
    st.sampled_from(REQUESTS),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_requests_are_other_requests_or_bad_frames(
    request_: m.AnyRequest, damage: list[tuple[int, int]]
) -> None:
    frame, rest = framed.to_frames(request_)
    for place, value in damage:
        frame[place] = value
    try:
        found = read(frame, rest)
    except BadFrame:
        return
    assert isinstance(found, m.AnyRequest)
    assert all(where.offset >= 0 for where in getattr(found, "into", ()))


@given(st.binary(min_size=framed.FRAME_BYTES, max_size=framed.FRAME_BYTES))
def test_any_bytes_are_a_reply_or_a_bad_frame(head: bytes) -> None:
    frame = np.frombuffer(head, dtype=np.uint8).copy()
    try:
        framed.rest_bytes(frame)
        reply = framed.read_reply(frame, None)
    except BadFrame:
        return
    assert isinstance(reply, m.Reply)


@pytest.mark.parametrize(
    "wrong",
    [
        m.Assign(1, 0, 0, m.Where(-1, 0, 0)),
        m.Assign(1, 0, 0, m.Where(1 << 31, 0, 0)),
        m.Assign(1, 0, 0, m.Where(1, 0, -8)),
        m.Push(-1, 0, 0, 1, None, "float32"),
        m.Push(1 << 43, 0, 0, 1, None, "float32"),  # its tag would be another's
        m.LoadState(1, 0, 0, (m.EncodedStateEntry(0, "exp_avg", None, "float32", (-1, -6)),)),
        m.LoadState(1, 0, 0, (m.EncodedStateEntry(-1, "exp_avg", 1.0),)),
        m.Open(
            1, TableSpec("t", (0,), (ShardSpec("s", "float32", -1, ()),), SPEC.optimizer, SPEC.rule)
        ),
    ],
)
def test_numbers_that_cannot_be_places_are_bad_frames(wrong: m.AnyRequest) -> None:
    with pytest.raises(BadFrame, match="Expected `int`"):
        read(*framed.to_frames(wrong))


def raw(data: bytes) -> tuple[np.ndarray, np.ndarray | None]:
    """Return frames of a message that is already encoded."""
    head = len(data).to_bytes(4, "little") + b"\1\0\0\0"
    whole = head + data
    frame = np.frombuffer(whole[: framed.FRAME_BYTES].ljust(framed.FRAME_BYTES, b"\0"), np.uint8)
    rest = whole[framed.FRAME_BYTES :]
    return frame, np.frombuffer(rest, np.uint8) if rest else None


def test_text_that_is_no_text_is_a_bad_frame() -> None:
    frame, _ = framed.to_frames(m.Find(1, "XX"))
    with pytest.raises(BadFrame, match="utf-8"):
        read(*raw(frame[8:].tobytes().rstrip(b"\0").replace(b"XX", b"\x80\x80")))


def test_settings_without_a_bottom_are_a_bad_frame() -> None:
    data = framed._encoder.encode(m.Commit(1, 0, 1, ({"lr": "XX"},)))
    with pytest.raises(BadFrame, match="recursion"):
        read(*raw(data.replace(b"\xa2XX", b"\x91" * 100_000 + b"\xc0")))


@pytest.mark.parametrize("length", [0, (256 << 20) + 1, (1 << 32) - 1])
def test_lengths_that_cannot_be_ours(length: int) -> None:
    frame, _ = framed.to_frames(m.Keys(1))
    frame[:4] = np.frombuffer(length.to_bytes(4, "little"), dtype=np.uint8)
    with pytest.raises(BadFrame, match=f"{length} bytes"):
        framed.rest_bytes(frame)
