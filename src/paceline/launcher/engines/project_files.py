"""The files of a project that --sync copies: those that git would add, and no results of runs."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.runtime.formatting import data_size

# Never copied: histories, environments of this host, and what a job or Python writes.
EXCLUDED = frozenset({".git", ".venv", "runs", "__pycache__"})
# Larger projects contain data or results by mistake.
MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class ProjectFiles:
    """Names relative to `directory`, sorted, and the bytes of all of them."""

    directory: Path
    names: tuple[str, ...]
    num_bytes: int

    @property
    def list_bytes(self) -> bytes:
        """Return the names as rsync and comm read them, each with a zero byte at its end."""
        return b"".join(os.fsencode(name) + b"\0" for name in self.names)


def find_project_files(directory: Path, max_bytes: int = MAX_BYTES) -> ProjectFiles:
    """Return the files to copy; raises ConfigError for a home directory and for too many bytes."""
    directory = directory.resolve()
    if directory == Path.home().resolve() or directory == Path("/"):
        raise ConfigError(
            f"--sync copies the working directory, and that is {directory}; change to the directory"
            " of the project first"
        )
    listed = _listed_by_git(directory)
    names = _walk(directory) if listed is None else listed
    names = [name for name in names if not EXCLUDED & set(Path(name).parts)]
    sizes = {name: size for name in names if (size := _size(directory / name)) is not None}
    total = sum(sizes.values())
    if total > max_bytes:
        raise ConfigError(
            f"--sync would copy {data_size(total)} from {directory}, at most"
            f" {data_size(max_bytes)} are copied; the largest parts are {_largest(sizes)}: move"
            " data and results elsewhere, or list them in .gitignore of a git repository"
        )
    return ProjectFiles(directory, tuple(sorted(sizes, key=os.fsencode)), total)


def _listed_by_git(directory: Path) -> list[str] | None:
    """Return what git tracks or would add; None without git or a repository."""
    command = ["git", "-C", str(directory), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    if done.returncode != 0:
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    inner = [name for name in names if (directory / name).is_dir()]  # submodules
    files = [name for name in names if name not in inner]
    return [*files, *(f"{name}/{file}" for name in inner for file in _walk(directory / name))]


def _walk(directory: Path) -> list[str]:
    found: list[str] = []
    for place, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if name not in EXCLUDED and name not in links]
        found += [os.path.relpath(os.path.join(place, name), directory) for name in files + links]
    return found


def _size(path: Path) -> int | None:
    """Return the bytes of a file or link; None for what is gone and what is neither."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if path.is_symlink() or path.is_file() else None


def _largest(sizes: dict[str, int]) -> str:
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        first = Path(name).parts[0]
        parts[first] = parts.get(first, 0) + size
    top = sorted(parts, key=lambda part: -parts[part])[:3]
    return ", ".join(f"{part} ({data_size(parts[part])})" for part in top)
