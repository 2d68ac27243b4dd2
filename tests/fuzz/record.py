"""Makes seeds from the messages of running jobs: python -m fuzz.record

Jobs with servers, copies, data workers, leases, checkpoints and several hosts run for some seconds
with tap/sitecustomize.py on their path. A few inputs of each kind of message are added to the
corpus of the targets that decode it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from fuzz.target import ROOT, read_corpus, write_corpus

TAP = Path(__file__).parent / "tap"
_PER_TYPE = 2
_MAX_SEED = 2000
_MOST = 12000  # of files
_SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader
import paceline as pl

job = pl.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
loader = DataLoader(torch.randn(80, 4), 4, shuffle=True)
train = pl.shard(loader, mode=sys.argv[1])
saved = pl.Checkpoint(sys.argv[3], model=model, optimizer=optimizer)
for epoch in range(int(sys.argv[2])):
    for x in train:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
saved.save()
"""
_HOSTS = """
from support import run_ranks

def body(group):
    import sys
    sys.path.insert(0, "fault")
    import torch
    from ps_tables import remote_table
    from paceline.ps.spec import Rule
    for count in (3, 100):
        group.all_reduce(torch.ones(count))
    group.broadcast(torch.ones(2))
    if group.rank == 0:
        group.send(torch.ones(5), 1, tag=3)
    else:
        group.recv(torch.ones(5), 0, tag=3)
    for rule in (Rule(bound=None), Rule(0, aggregate=True)):
        table = remote_table(str(rule.bound), 8, rule)
        for _ in range(2):
            table.push(0).wait()
            table.commit(None).wait()

run_ranks(2, body, hosts=[0, 1, 2], servers=1)
"""
JOBS = (
    (
        "-n",
        "2",
        "-s",
        "1",
        "--pace",
        "ps",
        "--min",
        "1",
        "--max",
        "3",
        "script.py",
        "dynamic",
        "20",
        "saved-0",
    ),
    (
        "-n",
        "2",
        "-s",
        "2",
        "--replicas",
        "2",
        "--pace",
        "async",
        "script.py",
        "shard",
        "2",
        "saved-1",
    ),
    ("-n", "1", "--data-workers", "1", "script.py", "pipeline", "1", "saved-2"),
)
COMMANDS = ("status", "scale -n 3", "set pace=async", "servers")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        run_jobs(where)
        for name, inputs in seeds(where).items():
            add(name, (one for one in (_without_paths(one, where) for one in inputs) if one))


def run_jobs(where: Path) -> None:
    """Run all jobs in this directory; what they decode is in `tap` below it."""
    (where / "script.py").write_text(_SCRIPT)
    runtime = where / "runtime"
    runtime.mkdir(mode=0o700)
    path = os.pathsep.join((str(TAP), str(ROOT / "tests")))
    environ = {**os.environ, "FUZZ_TAP": str(where / "tap"), "PYTHONPATH": path}
    environ |= {"XDG_RUNTIME_DIR": str(runtime)}
    paceline = [sys.executable, "-m", "paceline"]
    for number, options in enumerate(JOBS):
        command = [*paceline, "run", "--log-dir", f"log{number}", "--trace", "5:7", *options]
        launched = subprocess.Popen(command, cwd=where, env=environ, stdout=subprocess.DEVNULL)
        if number == 0:
            time.sleep(8)
            for one in COMMANDS:
                subprocess.run([*paceline, *one.split()], cwd=where, env=environ, check=False)
            for name in ("job.json", "processes", "journal"):
                for path_found in runtime.glob(f"*/{name}"):
                    (where / name).write_bytes(path_found.read_bytes())
        launched.wait(120)
    subprocess.run(
        [sys.executable, "-c", _HOSTS],
        cwd=ROOT / "tests",
        env={**environ, "FUZZ_TAP_LINKS": "1"},
        check=False,
        timeout=120,
    )


def seeds(where: Path) -> dict[str, list[bytes]]:
    """Return seeds by target."""
    taps = {p.parent / "KIND": p.parent for p in (where / "tap").glob("*/KIND")}
    kinds = {path.read_text(): _in_order(directory) for path, directory in taps.items()}

    def of(pattern: str) -> list[bytes]:
        return [one for kind, some in kinds.items() if re.search(pattern, kind) for one in some]

    members = of(r"^msgpack .*messages\.Heartbeat \|.*StoreSet")
    operators = of(r"^msgpack .*messages\.Heartbeat \|.*operator_messages\.Watch")
    requests = of(r"^msgpack .*ps\.messages\.Open \|")
    stories = [_story([(0, one)]) for one in some_of_each(members)]
    stories += [_story([(5, one)]) for one in some_of_each(operators)]
    stories.append(_story([(n % 4, one) for n, one in enumerate(some_of_each(members))]))
    far = [one for one in requests if b"\xa5where\xc0" in one or b"Open" in one or b"Commit" in one]
    streams = [b"\1\0\0" + one for one in of("^engine stream")]
    logs = [where / f"log{number}" for number in range(len(JOBS))]
    lines = [line for log in logs for line in _read(log / "events.jsonl").splitlines(keepends=True)]
    manifests = [_read(path) for path in where.glob("saved-*/*/manifest.json")]
    parts = [_read(path)[:300] for path in where.glob("saved-*/*/part-*")]
    return {
        "listener_handshake": some_of_each(of(r"auth\.Hello'")),
        "proof_of_a_caller": some_of_each(of(r"auth\.Proof'")),
        "caller_handshake": some_of_each(of(r"auth\.Challenge'")),
        "message_to_member": some_of_each(of(r"^msgpack .*messages\.Reply \|.*Joined")),
        "message_to_operator": some_of_each(of(r"^msgpack .*messages\.Changed \|")),
        "coordinator": stories,
        "elastic_coordinator": stories,
        "coordinator_journal": [b"\1" + _read(where / "journal")[:_MAX_SEED]],
        "journal_entry": _entries(_read(where / "journal")),
        "server_frame": [_framed(one) for one in some_of_each(requests)],
        "server_reply": some_of_each(of(r"ps\.messages\.Reply'")),
        "replication_message": some_of_each(of(r"VisibleWorkers")),
        "server_requests": [_story([(n % 2, one) for n, one in enumerate(some_of_each(far))])],
        "batch_request": some_of_each(of(r"BatchRequest'")),
        "batch_reply": some_of_each(of(r"BatchReply'")),
        "state_of_a_peer": some_of_each(of(r"transfer\._Content'")),
        "template_reply": some_of_each(of(r"ForkReply'")),
        "gathered_object": some_of_each(of(r"^msgpack None")),
        "checkpoint_manifest": [b"1" + one for one in manifests],
        "checkpoint_parts": manifests,
        "checkpoint_part": parts,
        "event_lines": [b"".join(some_of_each(lines))[: 2 * _MAX_SEED], *some_of_each(lines)],
        "run_configuration": [_read(log / "config.json") for log in logs],
        "trace_file": [_short_trace(_read(log / "trace.json")) for log in logs],
        "facts_of_a_job": [_read(where / "job.json")],
        "processes_of_a_job": [_read(where / "processes")],
        "port_fuzz": streams,
        "group_fuzz": [one[:1] + b"\2" + one[3:] for one in streams],
        "frame_fuzz": [b"\1" + one[3:67] for one in streams],
    }


def some_of_each(messages: Iterable[bytes]) -> list[bytes]:
    """Return a few messages of each type."""
    found: dict[str, list[bytes]] = {}
    for one in sorted(set(messages), key=len):
        tag = re.search(rb'\xa4type[\xa0-\xbf](\w+)|"type":"(\w+)"', one)
        same = found.setdefault(str(tag and tag[0]), [])
        if len(same) < _PER_TYPE:
            same.append(one)
    return [one for same in found.values() for one in same if len(one) <= _MAX_SEED]


def add(name: str, inputs: Iterable[bytes]) -> None:
    """Add seeds to the corpus of a target, and print how many are new."""
    before = read_corpus(name)
    new = {one for one in inputs if one and len(one) <= _MOST} - set(before)
    write_corpus(name, [*before, *new])
    print(f"{name}: {len(new)} seeds added to {len(before)} inputs")


def _without_paths(data: bytes, where: Path) -> bytes | None:
    """Return text without the directories of this machine; None for msgpack that has them."""
    paths = {
        str(ROOT).encode(): b"/project",
        str(where).encode(): b"/job",
        sys.prefix.encode(): b"/env",
    }
    for path, shown in paths.items():
        if path in data:
            if data.lstrip(b"01")[:1] not in (b"{", b"["):
                return None
            data = data.replace(path, shown)
    return data


def _in_order(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "KIND"]


def _story(messages: list[tuple[int, bytes]]) -> bytes:
    return msgspec.msgpack.encode([(who, msgspec.Raw(message)) for who, message in messages])


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + b"\1\0\0\0" + message


def _entries(journal: bytes) -> list[bytes]:
    found, at = [], 0
    while at + 8 <= len(journal):
        length = int.from_bytes(journal[at : at + 4], "little")
        found.append(journal[at + 8 : at + 8 + length])
        at += 8 + length
    return some_of_each(found)


def _short_trace(data: bytes) -> bytes:
    tree = msgspec.json.decode(data) if data else {}
    tree["traceEvents"] = tree.get("traceEvents", [])[:12]
    return msgspec.json.encode(tree)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


if __name__ == "__main__":
    main()
