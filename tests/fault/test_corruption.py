"""Damage on the way between two hosts: BadFrame or a lost peer, never a wrong number.

Two engines in one process are connected through a proxy that damages the stream at a chosen byte,
plain and encrypted.
"""

from __future__ import annotations

import random
import socket
import threading

import pytest
import torch

from paceline import _core
from paceline.errors import BadFrame, PacelineError, PeerError
from support.ranks import run_processes

COUNT = 60_000  # several frames each way
_KEYS = (bytes(range(32)), bytes(range(32, 64)))
_FLOAT32, _SUM = _core.DTYPES.index("float32"), _core.OPS.index("sum")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        return first, server.accept()[0]


class Damage:
    """What happens to the stream at one position."""

    def __init__(self, kind: str, position: int) -> None:
        self.kind, self.position = kind, position
        self.has_happened = False

    def apply(self, start: int, data: bytearray) -> bytes:
        """Return what goes on instead of `data`, which begins at `start` of the stream."""
        at = self.position - start
        if not 0 <= at < len(data):
            return bytes(data)
        self.has_happened = True
        if self.kind == "flip":
            data[at] ^= 1 << (self.position % 8)
        elif self.kind == "drop":
            del data[at : at + 3]
        elif self.kind == "insert":
            data[at:at] = b"\x00\x01"
        elif self.kind == "repeat":
            data[at:at] = data[max(0, at - 64) : at] or b"\x07"
        elif self.kind == "noise":
            data[at:] = random.Random(self.position).randbytes(len(data) - at)
        return bytes(data)


def forward(source: socket.socket, target: socket.socket, damage: Damage | None) -> None:
    """Pass bytes on until one side ends."""
    start = 0
    try:
        while data := source.recv(1 << 16):
            target.sendall(damage.apply(start, bytearray(data)) if damage else data)
            start += len(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # an engine has closed its end


def connect(
    groups: list[_core.Group], lane: int, damage: Damage | None, is_encrypted: bool
) -> list[socket.socket]:
    """Give both groups a channel that goes through the proxy; only 0 -> 1 is damaged."""
    mine, from_first = tcp_pair()
    to_second, theirs = tcp_pair()
    for ends in ((from_first, to_second, damage), (to_second, from_first, None)):
        threading.Thread(target=forward, args=ends, daemon=True).start()
    for sock, group, peer, keys in (
        (mine, groups[0], 1, _KEYS),
        (theirs, groups[1], 0, _KEYS[::-1]),
    ):
        sock.setblocking(False)
        group.add_channel(peer, lane, sock.detach(), (0, *keys) if is_encrypted else None)
    return [from_first, to_second]


def error_of(work: _core.Work, tensor: torch.Tensor) -> PacelineError | None:
    """Wait; an operation that succeeds must have the right numbers."""
    try:
        work.wait(30.0)
    except PacelineError as error:
        return error
    assert torch.equal(tensor, 2 * torch.arange(COUNT, dtype=torch.float32) + 1), "wrong numbers"
    return None


def reduce_through(
    engines: list[_core.Engine], number: int, damage: Damage, is_encrypted: bool
) -> list[object]:
    """All-reduce between the two engines; return each side's error, or None."""
    groups = [_core.Group(engine, number, 1, [0, 1], [0, 1], 20.0) for engine in engines]
    proxied = connect(groups, 0, damage, is_encrypted) + connect(groups, 1, None, is_encrypted)
    tensors = [torch.arange(COUNT, dtype=torch.float32) + rank for rank in range(2)]
    works = [
        group.start_all_reduce(t.data_ptr(), t.data_ptr(), COUNT, _FLOAT32, _SUM, list(t.shape))
        for group, t in zip(groups, tensors, strict=True)
    ]
    errors = [error_of(work, tensor) for work, tensor in zip(works, tensors, strict=True)]
    for sock in proxied:
        sock.close()
    for group in groups:
        group.close()
    return errors


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", ["flip", "drop", "insert", "repeat", "noise"])
def test_damage_is_noticed_and_never_used(kind: str, is_encrypted: bool) -> None:
    def body(_: int) -> list[tuple[int, bool, list[str]]]:
        engines = [_core.Engine(rank, 1, 60.0, 8.0, 60.0) for rank in range(2)]
        chosen = random.Random(kind)
        # Headers and descriptors at the front, then anywhere.
        positions = [*range(0, 200, 17)] + [chosen.randrange(COUNT * 4) for _ in range(20)]
        found = []
        for number, position in enumerate(positions):
            damage = Damage(kind, position)
            errors = reduce_through(engines, number + 1, damage, is_encrypted)
            for error in errors:
                assert error is None or isinstance(error, (BadFrame, PeerError)), error
            texts = [f"{type(error).__name__}: {error}" for error in errors]
            found.append((position, damage.has_happened, texts))
        return found

    [outcome] = run_processes(body, [{}], timeout_s=100)
    assert outcome.error is None and outcome.status == 0, outcome
    assert sum(happened for _, happened, _ in outcome.value) > 20
    # Plain bytes like these are a mistake of the peer; encrypted ones, an attack on the connection.
    expected = "PeerLost: encrypted record" if is_encrypted else "BadFrame"
    for position, happened, texts in outcome.value:
        assert not happened or any(expected in text for text in texts), (position, texts)


def test_frames_that_no_peer_would_send() -> None:
    def body(_: int) -> list[str]:
        engine = _core.Engine(0, 1, 60.0, 8.0, 60.0)
        texts = []
        for number, speech in enumerate(
            (b"x" * 64, bytes(64), b"PCL1" + b"\xff" * 60, b"GET / HTTP/1.1" * 9)
        ):
            group = _core.Group(engine, number + 1, 1, [0, 1], [0, 1], 20.0)
            sockets = [tcp_pair() for _ in range(2)]
            for lane, (mine, _) in enumerate(sockets):
                group.add_channel(1, lane, mine.detach())
            tensor = torch.ones(10)
            address = tensor.data_ptr()
            work = group.start_all_reduce(address, address, 10, _FLOAT32, _SUM, [10])
            sockets[0][1].sendall(speech)
            with pytest.raises(BadFrame) as caught:
                work.wait(20.0)
            texts.append(str(caught.value))
            assert torch.equal(tensor, torch.ones(10))
            for _, theirs in sockets:
                theirs.close()
        return texts

    [outcome] = run_processes(body, [{}], timeout_s=60)
    assert outcome.error is None, outcome
    assert all("bad frame" in text and "expected" in text for text in outcome.value), outcome.value
