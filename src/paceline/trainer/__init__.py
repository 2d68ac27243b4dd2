"""pl.Trainer: the loop that most scripts write, with callbacks; optional."""
