"""The server's side of parameter servers.

process.py is the loop of the server process; server.py dispatches requests; table.py and shard.py
hold parameters. synchronous.py, asynchronous.py and backup_workers.py say when updates are applied;
staleness_bound.py decides which worker may read. Start with process.py or table.py.
"""
