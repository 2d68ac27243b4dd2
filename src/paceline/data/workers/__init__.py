"""Data workers: other processes make batches, trainers receive them finished.

    trainer                                  data workers (one or several stages in a row)
    shard.py -> source.py, feed.py   <---->  service.py   <---->  service.py of the stage before
                   |                            |
                supply.py: which worker to      |-- recipe.py: samples, stages, collate
                ask, and what if it dies        |
                   `-- connection.py, messages.py: what travels, and in which memory --'

A trainer sends ORDERS (which samples, which random numbers) a few batches ahead, and hands the
batches out in order. The content of a batch follows from its order alone. Start with source.py.
"""
