"""The server's side of parameter servers.

process.py is the loop of the server process; server.py dispatches requests; table.py and shard.py
hold parameters. synchronous.py, asynchronous.py and backup_workers.py say when updates are applied;
clock.py decides which worker may read (the staleness bound). Start with process.py or table.py.
"""
