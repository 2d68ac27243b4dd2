"""Starts echo agents from host a, through engine_driver.py."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from support.cluster.host_group import HostGroup

HERE = Path(__file__).parent
ECHO = f"export PYTHONPATH={shlex.quote(str(HERE))}"


class Driver:
    """Starts echo agents from host a, with a scratch directory as the working directory."""

    def __init__(self, cluster: HostGroup, scratch: Path) -> None:
        self.cluster, self.scratch = cluster, scratch
        self.command = [sys.executable, str(HERE / "engine_driver.py")]

    def words(self, *hosts: str, place: dict[str, str] | None = None, **more: Any) -> str:
        """Return what engine_driver.py reads."""
        asked = {
            "hosts": [[*host.split(":")[:1], 1, "", _port(host)] for host in hosts],
            "place": {
                "directory": str(self.scratch),
                "python": sys.executable,
                "activation": ECHO,
                "module": "echo_agent",
                **(place or {}),
            },
            "directory": str(self.scratch),
            "invitation": {"file": str(self.scratch / "seen"), **more.pop("invitation", {})},
            **more,
        }
        return json.dumps(asked) + "\n"

    def run(self, *hosts: str, **options: Any) -> Any:
        """Start agents and wait for their ends; return what was printed, as JSON."""
        done = self.cluster["a"].run(self.command, input=self.words(*hosts, **options))
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return answers[0] if len(answers) == 1 else answers

    def fail(self, host: str, **options: Any) -> dict[str, Any]:
        """Start an agent and expect its failure."""
        (result,) = self.run(host, **options)
        assert result["code"] != 0, result
        return result

    def seen(self, host: str) -> dict[str, Any]:
        """Return what the agent on a host was given."""
        return json.loads((self.scratch / f"seen.{host}").read_text())


def _port(host: str) -> int | None:
    return int(host.split(":")[1]) if ":" in host else None
