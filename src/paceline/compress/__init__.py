"""What travels instead of float32: fewer bits of every number, or fewer numbers.

`blocks`, `sparse` and `shared_scales` have the arithmetic, on flat tensors of the CPU; a `codec`
turns tensors into bytes with it; a `journey` is what happens to them between the workers.
"""
