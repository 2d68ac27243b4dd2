"""What travels instead of float32: fewer bits of every number, or fewer numbers.

`kernels` has the arithmetic, on flat tensors of the CPU; nothing here sends anything.
"""
