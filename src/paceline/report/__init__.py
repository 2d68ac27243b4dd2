"""A page about a run, made from its directory: plots and words in one file."""
