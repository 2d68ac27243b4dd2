"""The commit of the working directory, read from git's files: nothing has to be started for it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40,64}\Z")


def git_commit(directory: Path) -> str | None:
    """Return the commit that is checked out at a directory, or None where there is none."""
    with suppress(OSError, ValueError):
        for place in (directory, *directory.parents):
            if (place / ".git").exists():
                return _checked_out(_git_dir(place / ".git"))
    return None


def _git_dir(dot_git: Path) -> Path:
    """Follow the file that stands for the directory in worktrees and submodules."""
    if dot_git.is_dir():
        return dot_git
    target = dot_git.read_text().removeprefix("gitdir:").strip()
    return (dot_git.parent / target).resolve()


def _checked_out(git_dir: Path) -> str | None:
    head = (git_dir / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _known(head)
    reference = head.removeprefix("ref:").strip()
    common = git_dir
    if (git_dir / "commondir").exists():  # of a worktree: branches are with the main one
        common = (git_dir / (git_dir / "commondir").read_text().strip()).resolve()
    if ".." in reference:
        return None
    if (common / reference).is_file():
        return _known((common / reference).read_text().strip())
    for line in (common / "packed-refs").read_text().splitlines():
        commit, _, name = line.partition(" ")
        if name == reference:
            return _known(commit)
    return None


def _known(text: str) -> str | None:
    return text if _COMMIT.match(text) else None
