"""The command `paceline`: one file for each verb, imported only when that verb is used.

Start with main.py; run.py and run_options.py are `paceline run`.
"""
