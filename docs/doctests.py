"""A griffe extension: examples in docstrings (`>>>`) become blocks of code on the reference pages.

In the docstrings they follow the text as doctest wants them; Markdown would take them for quotes.
"""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences every run of lines that begins with `>>>` and ends with an empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return the text with its examples in fences."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        begins = not inside and line.startswith(">>>")
        ends = inside and not line.strip()
        lines += ["", "```pycon"] if begins else ["```"] if ends else []
        inside = (inside or begins) and not ends
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
