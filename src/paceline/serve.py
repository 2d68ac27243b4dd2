"""The main program of a parameter server: `python -m paceline.serve`, started by the launcher."""
