"""State of a model beside its parameters: buffers, batch norm statistics, and who receives it.

Start with parts.py (what a newcomer receives) and checkpoint.py (what a checkpoint holds).
"""
