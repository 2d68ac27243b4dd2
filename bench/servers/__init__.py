"""What parameter_server.py measures: push and pull, training with servers, slow workers."""
