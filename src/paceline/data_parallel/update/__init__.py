"""optimizer.step() in a distributed model, one file for each way to update.

Start with step.py (replicated and sharded). With served.py servers run the optimizer;
coordinated_step.py runs averaging methods, and retries a step when workers are lost.
"""
