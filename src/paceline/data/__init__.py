"""Data for the workers: each sample goes to one of them.

shard.py                    pl.shard(loader): one object, which each pass asks for batches
  -> consensus.py           do all ranks mean the same loader and the same epoch?
  -> loaders.py             what was given, and what is kept about it between passes
  -> modes.py               what was asked for, and the source of batches that follows from it

SPLIT: whose samples are these?
     plan.py                which samples make a step, read from the loader's settings; warm-up
     order.py               the one order of samples that all workers follow
     split.py               the arithmetic: whose samples, and what weight

CURSOR: how far a pass is, and whose the rest is
     cursor.py              of a pass whose order is fixed; what is left is known as
       indices.py           places in an order, or
       positions.py         positions of a stream
     leased.py              of a pass whose batches the coordinator lends to whoever is free
     line.py                the cursors of one loader; passes.py: one pass, as its cursor needs it
     ledger.py              all lines and loops: a part of the job's state (state/protocol.py)
     loops.py               pl.steps, pl.epochs: loops that are entered where the others are
     resumption.py          from a checkpoint, with as many workers or others

SOURCES: what makes the passes
     sources.py             a loader with indices, a stream, other iterables, data of its own
       indexed.py           a pass over a copy of the loader that makes this worker's part
       stream.py            a pass over a stream, by striding
       in_step.py           workers tell each other what they have for a step
     partition.py, replicate.py, dynamic.py   other modes; balance.py: cut by speed
     samples.py             which sample could not be made, and where
     randomness.py          random numbers by the place of a batch, or as they were
     timing.py, epoch_line.py   what it took, and what was handed out

WORKERS: pipeline/          data workers make the batches: other processes, in stages, or hosts
"""
