"""One table of options: what a script or a command line can choose about training.

Start with table.py: each option of a pace, a server or a codec is declared there once. Parsing,
refusals, `--help`, the tables in the docs and the wire message follow from the declaration.
grammar.py has the types of options and imports nothing of Paceline but errors; table.py imports
compress/.
"""
