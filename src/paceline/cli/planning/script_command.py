"""ScriptCommand: a command that also takes its own options directly after the script.

    paceline parity train.py -n 3          the same as: paceline parity -n 3 train.py
    paceline parity train.py --lr 0.1      --lr is not an option of parity: it is the script's
    paceline parity train.py -- -n 3       what follows -- is the script's

These commands are typed about a script that exists, with `-n 3` as an afterthought. If the script
got these words, another number of workers would be measured, without a sign.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from paceline.runtime.console import say


class ScriptCommand(TyperCommand):
    """Reads own options before the script, and directly after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            for name in param.opts
            if name.startswith("-")
        }
        before, rest = _leading_options(args, takes_value)
        if rest and rest[0] != "--":
            script, rest = rest[:1], rest[1:]
            after, rest = _leading_options(rest, takes_value)
            if after:
                say(f"{shlex.join(after)}: read as options of {self.name}; the script's follow --")
            args = [*before, *after, *script, *rest[rest[:1] == ["--"] :]]
        return super().parse_args(ctx, args)


def _leading_options(
    words: Sequence[str], takes_value: dict[str, bool]
) -> tuple[list[str], list[str]]:
    """Return the options at the beginning, with their values, and the other words."""
    at = 0
    while at < len(words):
        name = words[at].partition("=")[0]
        if name in takes_value:
            # Of "--name=value" and of a flag, nothing follows.
            at += 1 + (takes_value[name] and "=" not in words[at])
        elif not name.startswith("--") and name[:2] in takes_value and takes_value[name[:2]]:
            at += 1  # -n3
        else:
            break
    return list(words[:at]), list(words[at:])
