"""Connections to the coordinator: a member's agent, an operator, and how processes meet.

Start with rendezvous.py (find or start the coordinator) and agent.py (a member's side).
operator.py is used by the launcher and by commands such as `paceline scale`.
"""
