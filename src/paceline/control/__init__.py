"""The control plane: rendezvous, membership, heartbeats, a store, authenticated connections.

    client/               a member's or operator's side: Agent, Operator, rendezvous
    coordinator/          the coordinator: connections, journal, store, work pools
    operator_messages.py  messages between operators and the coordinator
    membership/           decides the membership. Pure: no I/O, no clock
    messages.py           messages between members and the coordinator
    transport/            sockets, authentication, channels, the acceptor
    wait_notice.py        warnings about long waits
    member.py             Member and Membership: plain values

Each line imports only the lines below it.

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
modules of membership/ unchanged. Imports observe/telemetry and runtime's plain modules; needs no
torch.
"""
