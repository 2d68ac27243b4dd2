"""What `bench/chaos.py` runs: a training, and a process that kills its processes."""
