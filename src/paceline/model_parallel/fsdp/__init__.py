"""Fully sharded parameters: each process of the axis fsdp holds a slice of every parameter."""
