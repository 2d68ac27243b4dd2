"""The worker's side of parameter servers, and the neutral client for scripts.

Start with remote_table.py (a model's table) or client.py (named arrays for scripts). link.py sends
requests to one server; failover.py is what happens when another server takes over.
"""
