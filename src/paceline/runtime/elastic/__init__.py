"""A worker's side of membership changes: workers are lost, replaced and added while it trains.

    session.py             ElasticSession: retryable steps, entering a generation, joining
    recovery_plan.py       from the steps of all workers: which one sends state, what is repeated
    unit_agreement.py      on a mesh: the processes of a unit decide together
    free_running.py        the same changes at a free-running pace, without waiting
    membership_watcher.py  announced losses, and waiting for the next membership

Start with session.py. Every collective step of training is a RETRYABLE STEP. All workers take the
same steps in the same order, so two workers are never more than one step apart. If a worker is
lost, the remaining workers enter the next membership, exchange their step numbers, and repeat the
step that some of them have not finished, from inputs that each has kept. A worker that lags
receives the state of one that does not (state/stateful_parts.py). Imports comm/ and state/; used by
job.py and above.
"""
