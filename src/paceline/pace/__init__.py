"""Synchronization strategies: all-reduce, parameter servers, local SGD and others, by family.

A pace decides when workers agree, and averages the gradients of a full bucket, or whole models.

Start with exchange.py (a pace that averages gradients) or method.py (one that averages models),
then allreduce.py or outer.py as examples. registry.py lists the paces; parse.py reads their text.
A pace of your own is written with the names of paceline.extend. Imports ps/, compress/, comm/ and
runtime.job; the reducer in data_parallel/ knows only exchange.py.
"""
