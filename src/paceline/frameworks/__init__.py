"""What the packages for other frameworks share: paceline.keras, .tensorflow, .jax and .lightning.

    requirement.py     imports a framework, or says what to install
    twin.py            variables of any framework, trained by pl.distribute
    averages.py        means and broadcasts of plain arrays

Nothing here imports a framework.
"""
