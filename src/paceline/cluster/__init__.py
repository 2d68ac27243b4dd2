"""Who is in the job: rendezvous, membership, heartbeats, a small store, authenticated connections.

      member process                                coordinator (in the launcher or in rank 0)
      --------------                                ----------------------------------------
      rendezvous.establish                          coordinator.Coordinator
            |                                              |
      agent.Agent ------ channel.Channel ------ gate.Gate -+- store.Store
            |            (MACed frames)        (pre-auth limits)
      links.LinkListener ==== authenticated file descriptors ==== another member's LinkListener

`auth` holds the handshake and the keys without any I/O; everything that listens goes through
`gate`.
"""
