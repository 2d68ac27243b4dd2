"""Two hosts, which are network namespaces: what a listener on the wire between them can read."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from story_wires import Wires, wires

from paceline.control.transport.auth import create_secret_file

_TRAIN = textwrap.dedent("""
    import torch
    import paceline as pl

    pl.init()
    model = torch.nn.Linear(4, 2)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(20):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained on", pl.world_size(), flush=True)
""")
_PORT = 29_431
_LINE = "PACELINE_ENCRYPT=off: connections between hosts are not encrypted"


class Listener:
    """Keeps every packet that passes a network interface."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind((interface, 0))
        self._socket.settimeout(0.2)
        self._is_over = False
        self._packets: list[bytes] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._is_over:
            with contextlib.suppress(TimeoutError):
                self._packets.append(self._socket.recv(1 << 16))

    def control(self) -> bytes:
        """Stop; return what passed between the coordinator's port and others."""
        self._is_over = True
        self._thread.join()
        self._socket.close()
        port = _PORT.to_bytes(2, "big")
        return b"".join(p[54:] for p in self._packets if port in (p[34:36], p[36:38]))


def _train(net: Wires, path: Path, setting: str) -> str:
    """Start one worker on each host, as a user does by hand; return what they print."""
    script = path / "train.py"
    script.write_text(_TRAIN)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PACELINE_ENCRYPT": setting,
        "PACELINE_COORDINATOR": f"{net.address('here')}:{_PORT}",
        "PACELINE_SECRET_FILE": str(create_secret_file(path)),
        "PACELINE_JOB": "story",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    workers = []
    for rank, (host, words) in enumerate((("here", []), ("a", net.inside("a")))):
        variables = {**environ, "RANK": str(rank), "PACELINE_BIND": net.address(host)}
        workers.append(
            subprocess.Popen(
                [*words, sys.executable, str(script)],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = "".join(worker.communicate(timeout=90)[0] for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], said
    return said


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("setting", ["on", "off"])
def test_control_connections_between_hosts_are_encrypted_by_default(
    tmp_path: Path, setting: str
) -> None:
    with wires("here", "a") as net:
        listener = Listener(net.namespace("here"))
        try:
            said = _train(net, tmp_path, "" if setting == "on" else setting)
        finally:
            control = listener.control()
    assert said.count("trained on 2") == 2
    assert len(control) > 1000
    is_readable = [word in control for word in (b"Heartbeat", b"hostname", b"purpose")]
    assert is_readable == [setting == "off"] * 3
    assert (_LINE in said) is (setting == "off")
