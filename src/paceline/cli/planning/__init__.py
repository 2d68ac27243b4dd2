"""The commands that help to choose a pace: `plan` and `simulate`, and what they measure with."""
