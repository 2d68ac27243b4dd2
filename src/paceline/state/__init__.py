"""One state protocol: what a newcomer receives, and what a checkpoint holds.

protocol.py   Part, State and Change: what has state, what it is, why it is loaded
plain.py      the one serializer: nested state as plain data and tensors, or as JSON
transfer.py   the carrier to a peer; the carrier to files is in data_parallel and checkpointing
carried.py    an object of the script as a part
"""
