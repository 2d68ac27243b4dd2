"""State of a model beside its parameters: buffers, batch norm statistics, and transfers of state.

Start with elastic_state.py (what a newcomer receives) and checkpoint.py (what a checkpoint holds).
"""
