"""The commands that help to choose a pace: `plan`, `simulate`, `compare`, `parity`."""
