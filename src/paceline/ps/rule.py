"""The rule that a pace stands for on the servers: the same for a model and for keys of a client."""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import UsageError
from paceline.options.table import ServerOptions
from paceline.ps.spec import Rule

_FORM = re.compile(r"(ps|async)|(ssp)(?::([0-9]+))?")
_DEFAULT_STALENESS = 3


def rule_of(name: str, number: int, options: ServerOptions, *, is_elastic: bool = False) -> Rule:
    """Return the rule of a server pace; ssp:0 and backup:0 are `ps`: all wait for all.

    >>> rule_of("ssp", 2, ServerOptions(nonfinite="skip")).bound
    2
    """
    chosen = {field: getattr(options, field) for field in ServerOptions.__struct_fields__}
    if name == "backup" and number:
        # Nobody is bound to the clock of the slowest; and the first worker may be that one.
        return Rule(
            None, aggregate=True, backup=number, all_speak=True, is_elastic=is_elastic, **chosen
        )
    # A bound of 0 clocks is lockstep: then the mean is applied, once.
    is_lockstep = name == "ssp" and number == 0 and options.unit != "version"
    if name in ("ps", "backup") or is_lockstep:
        return Rule(0, aggregate=True, all_speak=is_elastic, **chosen)
    return Rule(None if name == "async" else number, all_speak=is_elastic, **chosen)


def client_rule(pace: str, options: dict[str, Any]) -> Rule:
    """Read a client's pace, with options as keywords; UsageError says what would be right.

    >>> client_rule("ssp:2", {}).bound
    2
    """
    found = _FORM.fullmatch(pace) if isinstance(pace, str) else None
    if found is None:
        raise UsageError(
            f"pace {pace!r:.80}: a client's pace is ps, async, ssp or ssp:3 (a bound >= 0); options"
            " are keywords, as in Client('async', nonfinite='skip')"
        )
    known = ServerOptions.__struct_fields__
    for name in options:
        if name not in known:
            raise UsageError(f"a client has no option {name!r}; it has {', '.join(known)}")
    number = int(found[3] or _DEFAULT_STALENESS)
    return rule_of(found[1] or found[2], number, ServerOptions(**options))
