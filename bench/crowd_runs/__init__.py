"""Jobs of very many processes, or clients: for bench/many_clients.py and many_processes.py."""
