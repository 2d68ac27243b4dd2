"""Data parallel training: the same model on every worker, gradients agreed on during backward."""
