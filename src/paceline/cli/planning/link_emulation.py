"""How `paceline compare --link` emulates links: network namespaces, or pacing in the engine.

Namespaces are the more faithful: the kernel's TCP runs over a link of that rate, and everything
that a job sends passes it. They need rights. Pacing needs none, and delays only what the engine
sends between workers and servers: not the control plane, and nothing that the script sends itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from paceline.cli.planning.shaped_hosts import (
    ShapedHosts,
    enter_user_namespace,
    find_delay_problem,
    find_rights,
)
from paceline.errors import ConfigError, UsageError
from paceline.planner.quantities import DEFAULT_LATENCY_S, Link, rate_text
from paceline.runtime.console import say
from paceline.runtime.emulated_links import EmulatedLinks

ROUTES = ("auto", "namespaces", "pacing")
# Below, a heartbeat waits for more than a second after a message of 16 kB. Above, the processes
# cannot send as fast as the link: TCP on one machine carries some gigabytes per second.
_LEAST_RATE, _MOST_RATE, _MOST_LATENCY_S = 128e3 / 8, 10e9 / 8, 1.0


class PacedHosts:
    """Hosts of one worker each on this machine; use it in a `with` statement.

    It has what ShapedHosts has, for `paceline run`.
    """

    options: Sequence[str] = ()

    def __init__(self, num_hosts: int, link: Link, directory: Path, why: str = "") -> None:
        self._file = directory / "links"
        self._sizes = (num_hosts, link.bytes_per_s, link.latency_s)
        self._why = f" ({why})" if why else ""

    @property
    def environ(self) -> dict[str, str]:
        """Variables for `paceline run`: the file of the links."""
        return {"PACELINE_EMULATE_LINKS": str(self._file)}

    def enter(self, host: int = 0) -> list[str]:
        """Return the beginning of a command that runs on one host: nothing."""
        del host
        return []

    @property
    def text(self) -> str:
        """What the table and the page say about the links."""
        return "links are emulated by pacing in the engine"

    def __enter__(self) -> PacedHosts:
        links = EmulatedLinks.create(self._file, *self._sizes)
        say(f"{links.text}{self._why}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.unlink(missing_ok=True)


class LinkRoute:
    """The route that was chosen; raises UsageError if none can emulate these links.

    Without root it may run the command again inside of a user namespace. `arguments` is the whole
    command line after "paceline".
    """

    def __init__(self, wanted: str, link: Link, arguments: Sequence[str]) -> None:
        if wanted not in ROUTES:
            raise ConfigError(f"--emulate {wanted!r}: expected {', '.join(ROUTES)}")
        self._link, self._why = link, ""
        self.is_paced = wanted == "pacing"
        if not self.is_paced:
            self._why, user_namespace = find_rights()
            if not self._why and link.latency_s > DEFAULT_LATENCY_S:
                self._why = find_delay_problem(user_namespace)
            if not self._why:
                enter_user_namespace(user_namespace, arguments)
                return
        if wanted == "namespaces":
            raise UsageError(
                f"--link {link.text} --emulate namespaces: {self._why}; or leave out --emulate:"
                " then the engine paces what workers and servers send, which needs no rights"
            )
        self.is_paced = True
        self._require_pacing()

    def hosts(self, num_hosts: int, directory: Path) -> ShapedHosts | PacedHosts:
        """Return the hosts."""
        if self.is_paced:
            why = self._why.partition(". ")[0]
            return PacedHosts(num_hosts, self._link, directory, why)
        return ShapedHosts(num_hosts, self._link, directory)

    def _require_pacing(self) -> None:
        rate, latency_s = self._link.bytes_per_s, self._link.latency_s
        problem = ""
        if rate < _LEAST_RATE:
            problem = f"at less than {rate_text(_LEAST_RATE)} heartbeats would be late"
        elif rate > _MOST_RATE:
            problem = f"processes of one machine keep up with at most {rate_text(_MOST_RATE)}"
        elif latency_s > _MOST_LATENCY_S:
            problem = f"a latency of more than {_MOST_LATENCY_S:g} s would pass for a lost peer"
        if problem:
            namespaces = f", and network namespaces are not possible: {self._why}" * bool(self._why)
            raise UsageError(
                f"--link {self._link.text} cannot be emulated by pacing in the engine: {problem}"
                f"{namespaces}"
            )
