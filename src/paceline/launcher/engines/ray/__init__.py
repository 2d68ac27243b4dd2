"""The Ray engine: hosts are nodes that Ray chooses, agents are children of Ray actors.

    request.py          --on ray[://ADDRESS] and its options: what is asked of Ray
    engine.py           the engine, in the launcher; it never imports Ray
    messages.py         between the engine and its driver
    driver_main.py      the driver: a child of the launcher that is connected to Ray
    connection.py       connects to a cluster; says what is wrong if that fails
    placements.py       placement groups: which node has room for how many processes
    node_actor.py       the actor on each node: runs the agent, ships a function and its results
    function.py         what pl.ray.run ships; function_main.py: the program of its workers

    launcher --- stdin, stdout --- driver --- Ray --- actor --- stdin --- agent --- processes
        `------------------------- control connection, TLS --------------'

Ray decides where processes may run. Everything else is the same as with ssh: agents connect to the
launcher, which notices a dead node by that connection, long before Ray does.
"""
