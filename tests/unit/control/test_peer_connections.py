"""Links come out as plain descriptors, go to the right peer, and strangers cannot hold them up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from paceline.control.transport.link_encryption import Link
from paceline.control.transport.peer_connections import LinkListener
from paceline.control.transport.sockets import split_address
from paceline.errors import AuthError, ConnectError, RendezvousError


@pytest.fixture
def listeners(secret, job_id):
    """Make a listener for a rank; closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(rank: int, *, want_tcp: bool = True, job: str = job_id) -> LinkListener:
            listener = LinkListener(secret, job, rank, "127.0.0.1", want_tcp)
            stack.callback(listener.close)
            return listener

        yield make


@pytest.fixture
def pair(listeners, make_member):
    """Listeners of ranks 0 and 1, and rank 1 as a member."""
    low, high = listeners(0), listeners(1)
    return low, high, make_member(1, unix=high.unix_name, tcp=high.tcp_address)


@contextlib.contextmanager
def owned(*links: Link):
    try:
        yield
    finally:
        for link in links:
            os.close(link.fd)


@pytest.mark.parametrize("local", [True, False])
def test_bytes_flow_both_ways_from_the_first_on(pair, local):
    low, high, member = pair
    near = low.connect(member, "group:1", local)
    os.write(near.fd, b"before the other side took it")
    far = high.accepted(0, "group:1", 10)
    with owned(near, far):
        assert os.read(far.fd, 100) == b"before the other side took it"
        os.write(far.fd, b"back")
        assert os.read(near.fd, 100) == b"back"
        for descriptor in (near.fd, far.fd):
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_NONBLOCK
            assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                assert sock.family == (socket.AF_UNIX if local else socket.AF_INET)
                if not local:
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_descriptors_outlive_the_listener(pair):
    low, high, member = pair
    near, far = low.connect(member, "p", True), high.accepted(0, "p", 10)
    low.close()
    high.close()
    with owned(near, far):
        os.write(near.fd, b"still here")
        assert os.read(far.fd, 100) == b"still here"


def test_purposes_keep_links_apart(pair):
    low, high, member = pair
    links = {purpose: low.connect(member, purpose, True) for purpose in ("a", "b", "c")}
    for purpose, link in links.items():
        os.write(link.fd, purpose.encode())
    for purpose in ("c", "a", "b"):
        far = high.accepted(0, purpose, 10)
        with owned(far, links[purpose]):
            assert os.read(far.fd, 10) == purpose.encode()


def test_accepting_may_start_before_the_peer_connects(pair):
    low, high, member = pair
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(high.accepted(0, "late", 20)))
    waiting.start()
    near = low.connect(member, "late", False)
    waiting.join()
    with owned(near, *taken):
        assert len(taken) == 1


def test_a_peer_that_does_not_come_is_named(pair):
    with pytest.raises(RendezvousError, match=r"rank 1 waited 0.1 s for rank 0 .* 'group:9'"):
        pair[1].accepted(0, "group:9", 0.1)


@pytest.mark.parametrize("local", [True, False])
def test_a_peer_that_is_gone_is_named_with_its_address(pair, local):
    low, high, member = pair
    high.close()
    address = f"unix:{member.unix}" if local else member.tcp
    with pytest.raises(ConnectError, match=rf"rank 1 .* at {address}: .*tried \d+x in 0.2 s"):
        low.connect(member, "p", local, timeout_s=0.2)


def test_a_listener_of_another_job_or_rank_is_recognised(listeners, make_member):
    low, elsewhere, third = listeners(0), listeners(1, job="other"), listeners(2)
    for wrong in (elsewhere, third):
        member = make_member(1, unix=wrong.unix_name, tcp=wrong.tcp_address)
        with pytest.raises(AuthError, match="rank 0: rank 1"):
            low.connect(member, "p", True)


def test_one_host_needs_no_port(listeners):
    assert listeners(0, want_tcp=False).tcp_address == ""


def test_strangers_on_both_sockets_do_not_delay_a_link(pair):
    low, high, member = pair
    rng = random.Random(3)
    with contextlib.ExitStack() as stack:
        for index in range(150):
            family = socket.AF_UNIX if index % 2 else socket.AF_INET
            stranger = stack.enter_context(socket.socket(family))
            stranger.settimeout(10)
            stranger.connect("\0" + member.unix if index % 2 else split_address(member.tcp))
            stranger.sendall(rng.randbytes(rng.randrange(6)))
        for local in (True, False):
            near = low.connect(member, "p", local, timeout_s=20)
            with owned(near, high.accepted(0, "p", 20)):
                pass


AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("\\0" + sys.argv[1])
    sock.sendall(b"\\x05\\x00\\x00\\x00hello")
    print(sock.recv(10))
"""


def wait_until(is_true):
    """Wait for what the listener's thread does a moment after the caller has gone on."""
    deadline_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_even_heard(pair, caplog):
    run = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, pair[1].unix_name], capture_output=True, text=True
    )
    assert run.stdout.strip() in ("b''", "")  # hung up on before or after it had spoken
    wait_until(lambda: "uid 65534 connected, expected uid 0" in caplog.text)


def test_a_reset_peer_leaves_the_listener_alive(pair):
    low, high, member = pair
    sock = socket.create_connection(split_address(member.tcp))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.sendall(b"\x10")
    sock.close()
    near = low.connect(member, "p", False)
    with owned(near, high.accepted(0, "p", 10)):
        pass


def test_opening_and_closing_leaves_no_descriptor(secret, job_id, make_member):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        low, high = (LinkListener(secret, job_id, rank, want_tcp=True) for rank in range(2))
        member = make_member(1, unix=high.unix_name, tcp=high.tcp_address)
        os.close(low.connect(member, "taken", True).fd)
        os.close(high.accepted(0, "taken", 10).fd)
        os.close(low.connect(member, "not taken", False).fd)
        low.close()
        high.close()
        high.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_that_nobody_takes_are_limited(pair, make_member):
    """A member with the secret that connects for more and more purposes; the others can connect."""
    low, high, member = pair
    before = len(os.listdir("/proc/self/fd"))
    kept = [low.connect(member, f"purpose {number}", False) for number in range(256)]
    with pytest.raises(ConnectError, match=r"rank 1 .*closed the connection \(tried \d+x"):
        low.connect(member, "one too many", False, timeout_s=0.3)
    assert high._acceptor.refused > 1 and not high.has_arrived(0, "one too many")
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 256 + 4
    # What this process waits for arrives in any case, and another caller has room of its own.
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(high.accepted(0, "awaited", 20)))
    waiting.start()
    with owned(low.connect(member, "awaited", False)):
        waiting.join()
    with owned(*taken, high.connect(make_member(0, unix=low.unix_name), "back", True)):
        wait_until(lambda: low.has_arrived(1, "back"))
    for link in kept:
        os.close(link.fd)
    # Links whose callers have hung up make room.
    with owned(low.connect(member, "later", False), high.accepted(0, "later", 20)):
        pass
    assert len(os.listdir("/proc/self/fd")) - before <= 8
