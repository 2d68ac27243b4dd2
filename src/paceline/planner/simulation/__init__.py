"""Discrete-event simulation of the planner's cost model: many workers, chance, failures. No torch.

delays.py        how long each worker computes in each step, seeded
lockstep.py      paces in which all workers wait for all: one vector of workers per step
free_running.py  ssp and async: a heap of events
clock_rules.py   the clock rule of the servers, and its equal for many workers
failures.py      what failures, restarts and checkpoints cost over the simulated time
run.py           one simulation of one candidate, and its figures
sweep.py         simulations over workers and bandwidths, as CSV
"""
