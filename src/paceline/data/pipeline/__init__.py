"""Data workers: other processes make the batches, trainers receive them finished.

    trainer                                  data workers (one or several stages in a row)
    shard.py -> source.py, feed.py   <---->  service.py   <---->  service.py of the stage before
                   |                            |
                supply.py: whom to ask, and     |-- recipe.py: samples, stages, collate
                what if it dies                 |
                   `-- line.py, messages.py: what travels, and in which memory --'

A trainer asks for its batches by ORDERS (which samples, which random numbers), a few ahead of need,
and hands them out in order. What is made follows from the order alone, whoever makes it and when.
"""
