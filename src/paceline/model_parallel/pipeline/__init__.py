"""Pipeline parallel: a model is cut into stages, and microbatches flow through them."""
