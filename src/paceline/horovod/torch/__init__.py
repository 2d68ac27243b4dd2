"""Horovod's interface for PyTorch, on Paceline's engine: `import paceline.horovod.torch as hvd`."""
