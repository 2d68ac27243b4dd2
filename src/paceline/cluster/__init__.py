"""Who is in the job: rendezvous, membership, heartbeats, a small store, authenticated connections.

      member process                                coordinator (in the launcher, in rank 0, or in
      --------------                                an elastic job a process of its own)
      rendezvous.establish                          ----------------------------------------
            |                                       coordinator.Coordinator - audience, desk
      agent.Agent ------ channel.Channel ------ gate.Gate -+- store.Store
         (contact)       (MACed frames)        (pre-auth limits) +- roster.Roster: who is in
            |                                                    +- record, journal: what is known
      links.LinkListener ==== authenticated file descriptors ==== another member's LinkListener

      launcher, commands: operator.Operator ---------- desk.Desk

`auth` holds the handshake and the keys without any I/O; everything that listens goes through
`gate`. What is decided about members is decided in pure modules: `roster` (what was learnt, and
when), `changes` (the next membership), `departures` (lost or left), `adoption` (in which generation
members work), `partitions` (which server holds what), `places` (ranks, numbers and units), `leases`
(silent or lost); the simulation in the tests runs the same.
"""
