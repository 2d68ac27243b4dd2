"""pl.Trainer: the loop that most scripts write, with callbacks; optional.

    trainer.py      Trainer: fit, evaluate
    stepping.py     from a batch to a step: loss, accumulate, clip, scale, step
    evaluation.py   which model is evaluated, on whose samples; means weighted by samples
    callbacks.py    Callback, the names of hooks
    saving.py       its checkpoints; how far it is, for them and for newcomers
    checks.py       what is refused, before anything begins

It calls what a script written by hand calls, in the same order, and computes the same bits.
"""
