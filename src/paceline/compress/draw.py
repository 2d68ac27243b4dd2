"""Random numbers that nobody has to send."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """A random number for every element of a tensor, the same for whoever knows these three."""

    seed: int
    step: int
    first: int = 0  # index of the element that its first number belongs to

    def at(self, offset: int) -> Draw:
        """Return the numbers from so many elements on."""
        return Draw(self.seed, self.step, self.first + offset)

    @property
    def parts(self) -> tuple[int, int, int]:
        """What the engine is told."""
        return self.seed, self.step, self.first
