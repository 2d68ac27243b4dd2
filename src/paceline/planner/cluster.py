"""Cluster: the hosts of a job, their cores and memory, and the links between them.

A cluster file has hosts, one link for all pairs, and links of single pairs:

    hosts:
      - {name: a, cores: 16, memory: 64gb, workers: 4}
      - {name: b, cores: 16, memory: 64gb, workers: 4}
    link: 25gbit,50us
    links: {"a-b": "10gbit,80us"}

JSON is YAML too; a file without PyYAML must be JSON. A MACHINE is what cores belong to: hosts that
are namespaces of one machine (tests, benchmarks) share its cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paceline.errors import ConfigError
from paceline.planner.quantities import Link, parse_link, parse_size

# Of one core of the machine in docs/performance.md: bytes that it copies in a second.
COPY_BYTES_PER_S = 12e9
# CPU time for a byte on a TCP connection of ours: copies, checksum, encryption.
WIRE_CPU_S_PER_BYTE = 0.2e-9
DEFAULT_LINK = Link(1.25e9, 50e-6)


class Host(msgspec.Struct, frozen=True):
    """One host. `machine`: hosts with the same number share cores."""

    name: str
    cores: int
    memory_bytes: int
    workers: int
    machine: int = -1
    speed: float = 1.0  # relative to the host on which the model was measured


class Cluster(msgspec.Struct, frozen=True):
    """Hosts with workers, the link of every pair, and rates of the machines."""

    hosts: tuple[Host, ...]
    link: Link = DEFAULT_LINK
    links: dict[tuple[str, str], Link] = {}
    server_hosts: int = 0  # further hosts, for servers only
    server_names: tuple[str, ...] = ()  # of those that a cluster file lists
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    wire_cpu_s_per_byte: float = WIRE_CPU_S_PER_BYTE

    @property
    def num_workers(self) -> int:
        return sum(host.workers for host in self.hosts)

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def most_workers(self) -> int:
        """Workers of the fullest host."""
        return max(host.workers for host in self.hosts)

    def slowest_link(self) -> Link:
        """Return the rate and latency that a ring over all hosts has: the worst of each."""
        named = list(self.links.values())
        if len(named) < self.num_hosts * (self.num_hosts - 1) // 2 or not named:
            named.append(self.link)  # some pairs have no link of their own
        return Link(min(one.bytes_per_s for one in named), max(one.latency_s for one in named))

    def between(self, one: str, other: str) -> Link:
        """Return the link between two hosts."""
        return self.links.get((min(one, other), max(one, other)), self.link)

    def machine_loads(self) -> list[tuple[int, int, int]]:
        """Return cores, hosts and workers of each machine."""
        machines: dict[int, tuple[int, int, int]] = {}
        for at, host in enumerate(self.hosts):
            key = host.machine if host.machine >= 0 else -1 - at
            _, hosts, workers = machines.get(key, (0, 0, 0))
            machines[key] = (host.cores, hosts + 1, workers + host.workers)
        return list(machines.values())


def local_cluster(num_workers: int, cores: int, memory_bytes: int) -> Cluster:
    """Return this machine, with so many workers."""
    return Cluster((Host("localhost", cores, memory_bytes, num_workers),))


def even_cluster(
    num_workers: int, link: Link, *, per_host: int = 1, cores: int = 0, memory_bytes: int = 0
) -> Cluster:
    """Return equal hosts, by default with 4 cores for each worker.

    The last host has fewer workers if their number does not divide.
    """
    hosts = [
        Host(
            f"h{at}",
            cores or 4 * per_host,
            memory_bytes,
            min(per_host, num_workers - at * per_host),
        )
        for at in range(-(-num_workers // per_host))
    ]
    return Cluster(tuple(hosts), link)


# -- files ------------------------------------------------------------------------------------


class _HostLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    cores: Annotated[int, Meta(ge=1)] = 1
    memory: str | int = 0
    workers: Annotated[int, Meta(ge=0)] = 1
    speed: Annotated[float, Meta(gt=0)] = 1.0


class _ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: Annotated[tuple[_HostLine, ...], Meta(min_length=1)]
    link: str = DEFAULT_LINK.text
    links: dict[str, str] = {}
    server_hosts: Annotated[int, Meta(ge=0)] = 0


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file; raise ConfigError with what is wrong and where."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a cluster file") from None
    tree = _tree(text, path)
    try:
        given = msgspec.convert(tree, type=_ClusterFile)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: {error}; a cluster file has the keys"
            f" {', '.join(_ClusterFile.__struct_fields__)}, and a host"
            f" {', '.join(_HostLine.__struct_fields__)}"
        ) from None
    return _checked(given, str(path))


def _tree(text: bytes, path: Path) -> Any:
    if path.suffix == ".json":
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{path}: reading YAML needs PyYAML: pip install pyyaml, or write the file as JSON"
            " (cluster.json)"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None


def _checked(given: _ClusterFile, where: str) -> Cluster:
    names = [host.name for host in given.hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: host {twice[0]!r} is listed twice; give each host once")
    if not any(host.workers for host in given.hosts):
        raise ConfigError(f"{where}: no host has workers; set workers: of at least one host")
    hosts = tuple(
        Host(host.name, host.cores, _memory(host, where), host.workers, speed=host.speed)
        for host in given.hosts
        if host.workers
    )
    spare = tuple(host.name for host in given.hosts if not host.workers)
    return Cluster(
        hosts,
        parse_link(given.link, f"{where}: link"),
        dict(_pair(pair, text, names, where) for pair, text in given.links.items()),
        given.server_hosts + len(spare),
        spare,
    )


def _memory(host: _HostLine, where: str) -> int:
    if isinstance(host.memory, int):
        return host.memory
    return parse_size(host.memory, f"{where}: memory of host {host.name}:")


def _pair(pair: str, text: str, names: Sequence[str], where: str) -> tuple[tuple[str, str], Link]:
    for at in range(1, len(pair)):
        one, other = pair[:at], pair[at + 1 :]
        if pair[at] == "-" and one in names and other in names and one != other:
            return (min(one, other), max(one, other)), parse_link(text, f"{where}: link {pair}:")
    raise ConfigError(
        f"{where}: links: {pair!r} is not HOST-HOST of two listed hosts ({', '.join(names)})"
    )


def with_links(cluster: Cluster, links: Mapping[tuple[str, str], Link]) -> Cluster:
    """Return a cluster with measured links."""
    ordered = {(min(pair), max(pair)): link for pair, link in links.items()}
    return msgspec.structs.replace(cluster, links={**cluster.links, **ordered})
