"""What only model_parallel.py uses: its models, its contenders, and how they are measured."""
