"""Data workers: other processes make batches, trainers receive them finished.

    trainer                                  data workers (one or several stages in a row)
    shard.py -> source.py            <---->  service.py   <---->  service.py of the stage before
                   |                            |
                worker_pool.py: which worker    |-- recipe.py: samples, stages, collate
                to ask, and what if it dies     |
                   `-- connection.py, messages.py: the messages, and their memory --'

A trainer sends REQUESTS (which samples, which random numbers) a few batches ahead, and hands the
batches out in order. The content of a batch follows from its request alone. Start with source.py.
"""
