"""One server with very many TCP clients: throughput and fairness, beside a server with few.

    python bench/many_clients.py                          20 and 200 clients
    python bench/many_clients.py --clients 20 1000 --rounds 3
    python bench/many_clients.py --quick

Each client is `ps.Client` with its own engine and connection, in one of four processes. It pushes a
gradient and gets the parameters back, one request at a time. All jobs live at the same time and
take turns. Reported: requests per second, by best and by median turn; the server's processor time
for a request; and, as a measure of fairness, the most and the fewest requests of a client in one
turn. bench/README.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.report import machine, write_json

from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.transport.auth import create_secret_file, load_secret

_JOIN_S = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Job:
    """One server and its clients."""

    clients: int
    server: subprocess.Popen[str]
    groups: Sequence[subprocess.Popen[str]]
    rates: list[float] = field(default_factory=list)  # requests per second, of each turn
    spreads: list[tuple[int, int]] = field(default_factory=list)  # fewest, most of one client
    cpu_us: list[float] = field(default_factory=list)  # of the server, for a request
    sockets: int = 0  # of the server

    def turn(self, seconds: float, *, counts: bool = True) -> None:
        """Let all clients send requests for a while."""
        before_s = _cpu_s(self.server.pid)
        for group in self.groups:
            assert group.stdin is not None
            group.stdin.write(f"{seconds}\n")
            group.stdin.flush()
        done = [count for group in self.groups for count in json.loads(_line(group))]
        if counts:
            self.rates.append(sum(done) / seconds)
            self.spreads.append((min(done), max(done)))
            self.cpu_us.append((_cpu_s(self.server.pid) - before_s) / sum(done) * 1e6)

    def count_sockets(self) -> None:
        """Count the sockets that the server has open."""
        links = Path(f"/proc/{self.server.pid}/fd").iterdir()
        self.sockets = sum(os.readlink(link).startswith("socket:") for link in links)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} ended with {process.wait()}")
    return line


@contextlib.contextmanager
def started(clients: int, options: argparse.Namespace) -> Iterator[Job]:
    """Start a job of one server and so many clients; end it afterwards."""
    with tempfile.TemporaryDirectory(prefix="paceline-crowd-") as directory:
        secret_file, job_id = create_secret_file(Path(directory)), f"crowd-{clients}"
        os.environ["PACELINE_ENCRYPT"] = options.encrypt
        secret = load_secret(secret_file)
        coordinator = CoordinatorThread(Coordinator(job_id, secret, clients + 1, _JOIN_S))
        env = {
            **os.environ,
            "PACELINE_COORDINATOR": coordinator.start(),
            "PACELINE_JOB": job_id,
            "PACELINE_SECRET_FILE": str(secret_file),
            "PACELINE_JOIN_TIMEOUT_S": str(_JOIN_S),
            "PACELINE_LIVENESS_S": "60",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        place = {
            "PACELINE_ROLE": "server",
            "PACELINE_RANK": "0",
            "PACELINE_WORLD_SIZE": str(clients),
            "PACELINE_SERVERS": "1",
            "PACELINE_HOST_ID": "server",
        }
        processes = [_start(["paceline.runtime.server_main"], {**env, **place})]
        try:
            for number in range(options.processes):
                first, end = (clients * n // options.processes for n in (number, number + 1))
                what = [str(first), str(end - first), str(clients), str(options.elements)]
                processes.append(_start(["crowd_runs.clients", *what], env))
            for group in processes[1:]:
                assert _line(group) == "ready\n"
            yield Job(clients, processes[0], processes[1:])
        finally:
            for process in processes:
                process.kill()
                process.wait()
            coordinator.stop()


def _start(module: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", *module], subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)


def measure(sizes: Sequence[int], options: argparse.Namespace) -> list[Job]:
    """Let jobs of these numbers of clients take turns."""
    with contextlib.ExitStack() as stack:
        jobs = []
        for clients in sizes:
            jobs.append(stack.enter_context(started(clients, options)))
            print(f"{clients} clients are connected", flush=True)
        for job in jobs:
            job.turn(options.seconds / 2, counts=False)
        order = list(jobs)
        for _ in range(options.rounds):
            for job in order:
                job.turn(options.seconds)
            order.append(order.pop(0))
        for job in jobs:
            job.count_sockets()
        return jobs


def show(jobs: Sequence[Job], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    few = jobs[0]
    where = f"one server, {options.processes} processes of clients"
    print(f"\npush+pull of {options.elements} float32, {where}")
    print(
        f"{'clients':>8} {'best/s':>9} {'median/s':>9} {'of ' + str(few.clients):>12}"
        f" {'most/fewest':>12} {'server us':>10} {'its sockets':>12}"
    )
    rows = []
    for job in jobs:
        best, median = max(job.rates), statistics.median(job.rates)
        shares = best / max(few.rates), median / statistics.median(few.rates)
        fairness = max(most / max(fewest, 1) for fewest, most in job.spreads)
        row = {
            "clients": job.clients,
            "best": best,
            "median": median,
            "share_by_best": shares[0],
            "share_by_median": shares[1],
            "most_by_fewest": fairness,
            "fewest": min(fewest for fewest, _ in job.spreads),
            "server_us": statistics.median(job.cpu_us),
            "sockets": job.sockets,
        }
        rows.append(row)
        print(
            f"{job.clients:8} {best:9.0f} {median:9.0f} {shares[0]:5.0%} {shares[1]:6.0%}"
            f" {fairness:12.2f} {row['server_us']:10.0f} {row['sockets']:12}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", nargs="+", type=int, default=[20, 200])
    parser.add_argument("--elements", type=int, default=256, help="float32 values of the array")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4, help="that the clients are in")
    parser.add_argument("--encrypt", choices=["on", "off"], default="off")
    parser.add_argument("--out", type=Path, help="folder for the results, not bench/results")
    parser.add_argument("--quick", action="store_true", help="4 and 12 clients, one short turn")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.seconds, options.rounds = [4, 12], 0.3, 1
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    rows = show(measure(options.clients, options), options)
    content = {"machine": facts, "options": {**vars(options), "out": ""}, "rows": rows}
    print(f"written to {write_json('many-clients', content, options.out)}")


if __name__ == "__main__":
    main()
