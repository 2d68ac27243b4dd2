"""Removing: old checkpoints, and what saves that never ended have left.

What goes is first renamed to ".deleting-...", so that no checkpoint is found half removed.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.checkpoint import files, reading, staging
from paceline.errors import UsageError

_GOING = re.compile(r"\.deleting-[A-Za-z0-9_.-]+", re.ASCII)


def retain(root: Path, keep: int, *, saved: Path | None = None) -> list[Path]:
    """Keep the newest checkpoints, remove the older ones; return what was removed.

    Counted are those that look whole (manifest intact, parts of the right size), the last attempt
    of each step. So what is damaged never displaces what is not; it goes when it is older than all
    that is kept. `saved`, the one that was published just now, is the first of those that are kept:
    after a resume from an older step there may be others with higher ones.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: expected at least 1")
    kept: set[int] = set()
    going = []
    every = reading.listing(root)  # newest first
    for found in sorted(every, key=lambda found: found.path != saved):
        if len(kept) >= keep or found.step in kept:
            going.append(found.path)
        elif found.manifest is not None:
            kept.add(found.step)
    for path in reversed(going):
        files.remove_at_once(path)
    return going


def sweep(root: Path) -> list[Path]:
    """Remove what saves and removals that died have left; return what that was.

    Saves that somebody may still work on stay.
    """
    if not root.is_dir():
        return []
    with files.disk_errors("look into", root):
        entries = sorted(
            path for path in root.glob(".*") if path.is_dir() and not path.is_symlink()
        )
    dead = [path for path in entries if _GOING.fullmatch(path.name) or staging.is_dead(path)]
    for path in dead:
        files.remove_tree(path)
    return dead
