"""Codecs: what travels instead of float32. One file for each family.

    codec.py       Codec: the interface; registry.py lists codecs, parse.py reads their text
    blocks.py, sliced.py, shared_scales.py   fewer bits of every number
    sparsifiers.py, sparse_format.py, dgc.py fewer numbers
    powersgd.py    two thin matrices instead of one
    journey.py     the exchange of one compressed flat tensor between workers
    packet.py      the same on its way to a server

Start with codec.py. A codec of your own is written with the names of paceline.extend. Imports
comm/.
"""
