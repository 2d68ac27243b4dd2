"""Planning inside a running job, for `--pace auto` and `--max-wire`. Pure.

policy.py    which paces may be chosen
budget.py    a limit of what a host sends: variants of a pace that send less
decision.py  the choice among predictions, with hysteresis, and the lines that explain it
watch.py     when to plan again: other hosts, other links, steps of another length
"""
