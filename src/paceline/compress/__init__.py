"""Codecs: what is sent instead of float32. One file for each family.

    codec.py       the interface, and the layout of a flat tensor; registry.py: codecs by name
    reduction.py   the exchange of one compressed flat tensor between workers
    packet.py      the message to a server in place of a flat tensor
    quantizers.py  fewer bits per number: fp16, bf16, int8, int4, onebit
    sparsifiers.py, dgc.py    fewer numbers: topk, randomk, dgc
    powersgd.py    two low-rank factors in place of a matrix
    on_device.py, powersgd_on_device.py    codecs with torch operations, for tensors on a device
    kernels.py, blocks.py, sparse_format.py, sign_bits.py    the engine's kernels for tensors

Start with codec.py. To write your own codec, use the names of paceline.extend. Imports comm/.
"""
