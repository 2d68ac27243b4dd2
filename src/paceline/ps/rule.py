"""The rule that a pace stands for, for those who name it beside their keys.

The words are those of `pl.distribute`; options are keywords.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import UsageError
from paceline.ps.spec import Rule

_FORM = re.compile(r"(ps|async)|ssp(?::([0-9]+))?")
_DEFAULT_STALENESS = 3
_OWN = ("bound", "aggregate", "backup", "is_elastic", "mean_codec")  # of a pace, or for models only
_OPTIONS = tuple(name for name in Rule.__struct_fields__ if name not in _OWN)


def rule_of(pace: str, options: dict[str, Any]) -> Rule:
    """Read a pace: ps, async, ssp or ssp:3; UsageError says what would be right.

    >>> rule_of("ssp:2", {}).bound
    2
    """
    found = _FORM.fullmatch(pace) if isinstance(pace, str) else None
    if found is None:
        raise UsageError(
            f"pace {pace!r:.80}: a client's pace is ps, async, ssp or ssp:3 (a bound >= 0); options"
            " are keywords, as in Client('async', nonfinite='skip')"
        )
    for name in options:
        if name not in _OPTIONS:
            raise UsageError(f"a client has no option {name!r}; it has {', '.join(_OPTIONS)}")
    if found[1] == "async":
        return Rule(None, **options)
    bound = 0 if found[1] == "ps" else int(found[2] or _DEFAULT_STALENESS)
    # A bound of 0 clocks is lockstep: then the mean is applied, once.
    is_lockstep = found[1] == "ps" or (bound == 0 and options.get("unit") != "version")
    return Rule(bound, aggregate=is_lockstep, **options)
