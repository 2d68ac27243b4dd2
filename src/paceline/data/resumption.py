"""Placeholder until the data ledger is there."""


def data_state(job):
    return None


def resume_data(job, states, *, is_lockstep):
    return []
