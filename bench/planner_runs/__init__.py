"""What bench/planner.py runs and computes."""
