"""Going on when processes come and go.

    session.py    Elastic: numbered points, adoption of a membership, joining
    parts.py      everything on this worker whose state newcomers receive (state/protocol.py)
    verdict.py    from everybody's position: who is behind, who gives, what is done again
    unit.py       on a mesh: what the processes of a unit agree on
    alone.py      the same changes at a free-running pace, where nobody waits for anybody
    news.py       what is heard of other members, and waiting for the next membership

Every collective step of training is a POINT, and all workers pass the same points in the same
order, so two workers are never more than one point apart. When somebody is lost, the others meet in
the next membership, tell each other how far they are, and repeat the point that not all of them
have passed: from inputs that each has kept. Whoever is behind receives the state of one who is not.
"""
