"""Model parallel training: tensor, pipeline and sharded, with any pace on the data-parallel axis.

    distribute.py, setup.py   pl.distribute on a mesh
    mesh_model.py, train_step.py   a model in shards, and one step of it
    tensor/        tp: layers sharded over an axis
    pipeline/      pp: stages and microbatches
    fsdp/          fsdp: each process holds a slice of every parameter
    sharding/      which process holds which shard; full state from shards

Start with distribute.py. Imports data_parallel/.
"""
