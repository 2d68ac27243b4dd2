"""Authenticated connections of the control plane: sockets, handshake, frames.

Start with channel.py. auth.py has the job's secret, the handshake and the keys. Every incoming
connection passes acceptor.py, which limits a caller until it is authenticated. peer_connections.py
hands file descriptors between members to the C++ core.
"""
