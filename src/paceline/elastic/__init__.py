"""Going on when processes come and go.

    protocol.py   what a pace, the data or a user's object must offer to take part
    verdict.py    from everybody's position: who is behind, who gives, what is done again
    parcel.py     state on its way from one worker to another
    session.py    Elastic: numbered points, adoption of a membership, joining

Every collective step of training is a POINT, and all workers pass the same points in the same
order, so two workers are never more than one point apart. When somebody is lost, the others meet in
the next membership, tell each other how far they are, and repeat the point that not all of them
have passed: from inputs that each has kept. Whoever is behind receives the state of one who is not.
"""
