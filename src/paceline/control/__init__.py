"""The control plane: rendezvous, membership, heartbeats, a store, authenticated connections.

    client/       a member's or operator's side: Agent, Operator, rendezvous
    coordinator/  the coordinator: connections, journal, store, work pools
    membership/   decides the membership. Pure: no I/O, no clock
    transport/    sockets, authentication, messages, the acceptor
    member.py     Member and Membership: plain values
    wait_notice.py  the line about a long wait

      member process                                coordinator (in the launcher, in rank 0, or in
      --------------                                an elastic job a process of its own)
      client/rendezvous                             ----------------------------------------
            |                                       coordinator/coordinator
      client/agent ---- transport/channel ---- transport/acceptor -+- coordinator/store
            |            (MACed frames)        (limits before auth) +- membership/roster
            |                                                       +- coordinator/journal
      transport/peer_connections == authenticated file descriptors == another member's

      launcher, commands: client/operator ---- coordinator/operator_service

Start with coordinator/coordinator.py and membership/roster.py. The simulation in the tests runs the
modules of membership/ as they are. Imports observe/telemetry and runtime's plain modules; needs no
torch.
"""
