"""pl.launch: run a function on several workers from a notebook, a test or a plain script."""
