"""pl.Trainer: the usual training loop, with callbacks; optional.

    trainer.py      Trainer: fit, evaluate
    stepping.py     from a batch to a step: loss, accumulate, clip, scale, step
    evaluation.py   which model is evaluated, on which samples; means weighted by samples
    callbacks.py    Callback, the names of hooks
    saving.py       its checkpoints; its progress, for checkpoints and newcomers
    checks.py       checks of arguments, before training begins

It calls what a script written by hand calls, in the same order, and computes the same bits.
"""
