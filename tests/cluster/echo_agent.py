"""A stand-in for the agent: writes what it was given into a file, then waits for its stdin's end.

The invitation is JSON with the name of the file as "file".
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def main() -> int:
    line = sys.stdin.readline()
    invitation = json.loads(line)
    seen = {
        "host": socket.gethostname(),
        "directory": os.getcwd(),
        "python": sys.executable,
        "invitation": line,
        "environ": dict(os.environ),
        "command": [Path("/proc/self/cmdline").read_text()],
    }
    path = Path(f"{invitation['file']}.{socket.gethostname()}")
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(seen))
    new.rename(path)
    print("the agent has started", file=sys.stderr, flush=True)
    if invitation.get("ends"):
        return int(invitation["ends"])
    sys.stdin.read()
    path.with_name(f"{path.name}.end").touch()
    return 0
