"""Authenticated connections of the control plane: sockets, handshake, frames, messages.

Start with channel.py. auth.py has the handshake and the keys without I/O. Every connection from
outside passes acceptor.py, which limits what a stranger can do before it has proved itself.
peer_connections.py hands file descriptors between members to the C++ core.
"""
