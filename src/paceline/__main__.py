"""`python -m paceline`: the same as the command `paceline`."""

from paceline.cli.main import main

main()
