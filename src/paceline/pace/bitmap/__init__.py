"""The pace `bitmap`: a majority vote on the signs of gradients.

Start with pace.py. vote.py counts among workers, server_vote.py on parameter servers.
"""
