"""Copies of a partition: chain replication, catching up, failover.

Start with replication.py, which is pure. partition.py connects it with a server, peers.py with the
other servers; snapshot.py brings a new copy up to date.
"""
