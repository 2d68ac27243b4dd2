"""Data for the workers: each sample goes to one of them."""
