"""What `bench/chaos.py` runs: a training, and somebody who kills its processes."""
