"""The pace `bitmap`: a majority vote on the signs of gradients.

Start with pace.py. vote.py counts votes, among workers or on parameter servers.
"""
