"""docs/protocol.md names every message of the control plane."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from paceline.control import messages as m
from paceline.control import operator_messages as o

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"


def test_every_message_is_on_the_page() -> None:
    spoken = (m.MemberMessage, m.CoordinatorMessage, o.OperatorMessage, o.ToOperator)
    names = {kind.__name__ for union in spoken for kind in get_args(union)}
    named = set(re.findall(r"\w+", PAGE.read_text()))
    missing = {name for name in names - named if not name.startswith("Store")}  # "Store..."
    assert not missing


def test_every_kind_of_loss_is_on_the_page() -> None:
    table = PAGE.read_text().partition("A loss has a kind")[2].partition("**Operators**")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE)
    listed = [kind for row in rows if row != "kind" for kind in row.split(", ")]
    assert sorted(listed) == sorted(kind.value for kind in m.LossKind)
