"""pl.Trainer: the loop that most scripts write, with callbacks; optional.

    trainer.py      Trainer: fit, evaluate
    objective.py    the loss of a batch, from loss_fn or step_fn
    stepping.py     batches become a step: accumulate, clip, scale, step
    evaluation.py   which model is evaluated, on whose samples
    averages.py     means weighted by samples; what workers tell each other
    callbacks.py    Callback, the names of hooks
    saving.py       its checkpoints
    progress.py     how far a Trainer is, for checkpoints and newcomers
    checks.py       what is refused, before anything begins

It calls what a script written by hand calls, in the same order, and computes the same bits.
"""
