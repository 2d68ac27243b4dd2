"""The actor on a node: runs the agent, and gives its workers a function and takes their results.

Ray copies this file's code to the nodes, so it imports nothing but the standard library: whether
Paceline is installed there is for the agent's command to find out.

The agent is a child process. It ends with its standard input, so with this actor, and so with the
driver that owns the actor: Ray ends actors whose driver has ended. What workers print is in the
actor's log as well, because the agent repeats it on its standard output.

The function and the results travel over a socket without a file (an abstract name of Linux):
workers on the node connect to it, and only processes of the same user are answered.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

SOCKET_VARIABLE = "RAY_PACELINE_SOCKET"  # no PACELINE_ name: those are the launcher's
_GET = b"\xff\xff\xff\xff"


class NodeActor:
    """One on each node of a job."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._news: queue.Queue[tuple[str | None, int | None]] = queue.Queue()
        self._results: dict[int, bytes] = {}

    def facts(self) -> tuple[str, str]:
        """Return the directory and the interpreter of Ray's workers on this node."""
        return os.getcwd(), sys.executable

    def start(self, command: list[str], first_bytes: bytes, function: bytes | None) -> None:
        """Start the agent, with these bytes on its standard input, which stays open."""
        if function is not None:
            command = ["env", f"{SOCKET_VARIABLE}={self._serve(function)}", *command]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        threading.Thread(target=self._watch, args=(self._child, first_bytes), daemon=True).start()

    def next(self) -> tuple[list[str], int | None, dict[int, bytes]]:
        """Wait for news: lines of the agent's errors; at its end the exit code, and results."""
        lines, code = [], None
        line, code = self._news.get()
        while line is not None:
            lines.append(line)
            if self._news.empty():
                return lines, None, {}
            line, code = self._news.get()
        return lines, code, self._results

    def end(self, is_kill: bool) -> None:
        """Close the agent's standard input, or kill it."""
        if self._child is None:
            return
        if is_kill:
            self._child.kill()
        elif self._child.stdin is not None:
            self._child.stdin.close()

    def _watch(self, child: subprocess.Popen[bytes], first_bytes: bytes) -> None:
        assert child.stdin is not None and child.stderr is not None
        with contextlib.suppress(OSError, ValueError):  # its exit code and its errors say why
            child.stdin.write(first_bytes)
            child.stdin.flush()
        with child.stderr:
            for line in child.stderr:
                self._news.put((line.decode(errors="replace").rstrip(), None))
        code = child.wait()
        with contextlib.suppress(OSError):
            child.stdin.close()
        self._news.put((None, code))

    # -- the function and its results -----------------------------------------------------------

    def _serve(self, function: bytes) -> str:
        name = f"paceline-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}")
        listener.listen(128)
        threading.Thread(target=self._accept, args=(listener, function), daemon=True).start()
        return name

    def _accept(self, listener: socket.socket, function: bytes) -> None:
        while True:
            connection, _ = listener.accept()
            args = (connection, function)
            threading.Thread(target=self._answer, args=args, daemon=True).start()

    def _answer(self, connection: socket.socket, function: bytes) -> None:
        """Answer a worker: it asks for the function, or sends its rank and then its result."""
        with connection:
            size = struct.calcsize("3i")
            _, user, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )
            if user != os.getuid():
                return
            stream: Any = connection.makefile("rb")
            asked = stream.read(4)
            if asked == _GET:
                connection.sendall(function)
            elif len(asked) == 4:
                self._results[int.from_bytes(asked, "big")] = stream.read()
                connection.sendall(b".")


# -- in a worker ---------------------------------------------------------------------------------


def fetch_function(name: str) -> bytes:
    """Return the function that the actor of this node has; raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        connection.sendall(_GET)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()


def send_result(name: str, rank: int, result: bytes) -> None:
    """Give a result to the actor of this node; raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        connection.sendall(rank.to_bytes(4, "big") + result)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
