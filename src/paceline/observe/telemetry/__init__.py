"""Events that running processes report, and RunState, the one fold of them.

Start with events.py, reporter.py (a worker's side) and run_state.py. Needs no torch.
"""
