"""Sockets that must not live on in forked children.

A data loader forks workers out of a training process. Without this, such a child would keep the
parent's connections and ports open after the parent was killed, and nobody would notice the loss.
Programs started with exec are no concern: Python's descriptors are close-on-exec.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> socket.socket:
    """Close this socket in every child that is forked while it is open; returns the socket."""
    _sockets.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_all)
