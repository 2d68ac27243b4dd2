"""Tables as text: a header, and columns as wide as their widest cell."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.runtime.formatting import width_of


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table; the first `left` columns are aligned to the left, the others to the right.

    A last column named "" is free text, also to the left.
    """
    every = [list(header), *(list(row) for row in rows)]
    widths = [max(width_of(row[at]) for row in every) for at in range(len(header))]
    lines = []
    for row in every:
        cells = []
        for at, cell in enumerate(row):
            gap = " " * (widths[at] - width_of(cell))
            is_left = at < left or not header[at]
            cells.append(cell + gap if is_left else gap + cell)
        lines.append("  ".join(cells).rstrip())
    return "".join(f"{line}\n" for line in lines)
