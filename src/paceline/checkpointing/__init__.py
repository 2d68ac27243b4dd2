"""Checkpoints of a running job: what is in one, when it is taken, how a job goes on from it."""
