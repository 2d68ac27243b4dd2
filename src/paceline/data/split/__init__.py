"""Which samples go to which worker: the modes of pl.shard, and the arithmetic.

Start with modes.py. order.py has the one order of samples that all workers follow, plan.py the
samples of a step, weights.py the arithmetic; partition.py, replicate.py and dynamic.py are one mode
each.
"""
