"""What `pl.ray.run` ships, and what comes back: files in a directory that only its caller reads.

    function        the function and its arguments, by Ray's own serialisation
    result-3        what the function returned on rank 3, the same way

Ray's serialisation runs code when it is read. It stays inside of Ray's trust boundary: only who may
use the cluster gives it bytes. Nothing of Paceline's own connections is read like that.
"""

from __future__ import annotations

from pathlib import Path

FUNCTION_FILE = "function"
DIRECTORY_VARIABLE = "PACELINE_RAY_FUNCTION"  # of the launcher that pl.ray.run starts


def result_file(directory: str, rank: int) -> Path:
    """Return the file of what a rank returned."""
    return Path(directory) / f"result-{rank}"
