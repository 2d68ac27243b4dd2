"""Groups: modules that are cut together or not at all, and the regions around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from paceline.model_parallel.tensor.tracing import Findings


@dataclass
class Group:
    """Modules that one decision is about; tied weights can join several regions."""

    names: set[str]
    regions: set[str]


def grouped(modules: dict[str, nn.Module], findings: Findings) -> list[Group]:
    """Return the groups in the order in which the model uses them."""
    linked = _joined(g & findings.styles.keys() for g in findings.groups)
    owners: dict[int, set[str]] = {}
    for name in findings.styles:
        for param in modules[name].parameters():
            owners.setdefault(id(param), set()).add(name)
    decisions = _joined([*linked, *owners.values()])
    called = findings.called
    return [
        Group(names, {_around(one, called) for one in linked if one <= names})
        for names in decisions
    ]


def _joined(sets: Iterable[Iterable[str]]) -> list[set[str]]:
    """Join sets that have something in common."""
    result: list[set[str]] = []
    for given in sets:
        new = set(given)
        if not new:
            continue
        apart = [one for one in result if not one & new]
        touching = [one for one in result if one & new]
        for one in touching:
            new |= one
        result = [*apart, new]
    return result


def _around(names: set[str], called: set[str]) -> str:
    """Return the smallest module that was called and has all of these in it."""
    first, *others = [name.split(".") for name in sorted(names)]
    if not others:
        return ".".join(first)
    length = 0
    while all(len(o) > length and o[length] == first[length] for o in others):
        length += 1
        if length == len(first):
            break
    steps = first[:length]
    while steps and ".".join(steps) not in called:
        steps = steps[:-1]
    return ".".join(steps)
