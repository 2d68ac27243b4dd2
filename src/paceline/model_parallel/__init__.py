"""Model parallel: tensor, pipeline and sharded, with any pace on the data-parallel axis."""
