"""The backend "paceline" of torch.distributed, on the engine of comm/.

Start with backend.py. process_group.py is the group without its collectives, work.py the handle of
an operation, composite.py what no single operation of the engine does.
"""
