"""What bench/data_pipeline.py runs: a trainer that takes batches, and where its processes are."""
