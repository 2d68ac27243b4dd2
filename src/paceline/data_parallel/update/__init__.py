"""optimizer.step() in a distributed model, one file for each way to update.

Start with step.py (replicated and sharded). served.py lets servers run the optimizer,
model_averaging.py runs an averaging method, elastic.py retries a step when workers are lost.
"""
