"""The options of paces, servers and codecs that a script or the command line can set.

Start with table.py: it declares the options of paces and servers, each once. Parsing, errors,
`--help`, the tables in the docs and the message to the servers follow from the declaration.
grammar.py has the types of options and imports only errors from Paceline; table.py imports
compress/.
"""
