"""Runs one Python target under atheris: python -m fuzz.search TARGET [flags of libFuzzer] DIRECTORY

The modules of Paceline that are imported here are instrumented, so that new code in a decoder, or
in a check after it, makes an input worth keeping. The target "all" is all of them in one process:
the first byte of an input chooses.
"""

from __future__ import annotations

import random
import sys

import atheris

ALL = "all"


def main() -> None:
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["paceline", "fuzz"]):
        from fuzz.mutation import mutate
        from fuzz.target import Target, load_all

        targets = load_all()
    known = list(targets.values())
    dice = random.Random()

    def choose(data: bytes) -> tuple[Target, bytes, bytes]:
        """Return the target of an input, the byte that chooses it, and the rest."""
        if name != ALL:
            return targets[name], b"", data
        return known[(data[0] if data else 0) % len(known)], data[:1], data[1:]

    def try_one(data: bytes) -> None:
        chosen, _, rest = choose(data)
        chosen.try_one(rest)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        dice.seed(seed)
        chosen, first, rest = choose(data)
        changed = mutate(rest, chosen.form, seed) if chosen.form and dice.random() < 0.7 else None
        if changed is None or len(changed) >= max_size:
            return first + atheris.Mutate(rest, max_size - len(first))
        return first + changed

    atheris.Setup(sys.argv, try_one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
