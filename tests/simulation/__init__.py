"""Deterministic simulation of membership and replication: the production cores in a made-up world.

    World (world.py)         a virtual clock, a queue of events, everything drawn from one seed
      Network (network.py)   ordered connections that break or stay half-open; links that are cut
      Process (process.py)   crash, restart, SIGSTOP, starvation, slowness
    Job (job.py)             what is drawn about a job, and its way from start to end
      coordinator.py         Roster and Journal of production, on a disk that survives
      server.py, table.py    Replica of production, around a table that counts
      worker.py              the failover of production, around a client that counts
      lockstep.py            `plan_recovery` of production, among workers that train together
      launcher.py            starts whoever is wanted, ends whoever is lost
    faults.py                what goes wrong: a plan, drawn beforehand, from which one can leave out
    invariants.py            what must hold, at every event and in the end
    mutants.py               broken cores that have to be found

`python -m simulation --seeds 10000` (in tests/) runs many; `--seed 7` tells the story of one.
"""
