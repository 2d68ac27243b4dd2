"""Deterministic simulation of membership and replication: the production cores in a made-up world.

World (world.py)          a virtual clock, a queue of events, everything drawn from one seed
  Network (network.py)    ordered connections that delay, break, half-open; links that are cut
  Process (process.py)    crash, restart, SIGSTOP, slowness
"""
