"""Hosts that go away after a notice: what the others notice of it, and how much work is useful.

    sudo python bench/preemption.py                       # both, the chaos for 75 s
    sudo python bench/preemption.py --seconds 600 --events 100
    sudo python bench/preemption.py --only shards --megabytes 1000

The hosts are namespaces on this machine, with a real sshd each.

SHARDS: three hosts, a worker on each, servers on b and c. The server on c holds an array of the
given size besides the parameters of a small model. Host c gets a notice of 30 s. Reported: the
seconds until it has left, the longest step of the other workers meanwhile against the longest one
before, and how many steps were repeated.

CHAOS: workers and servers with two copies on four hosts. Again and again a host gets a notice, or a
process is killed; a host that has left is added again. A server is killed only while each partition
has both copies: two copies promise to survive one loss. EFFICIENCY is the share of all samples that
any process began to compute that were in a step that counts, SPEED the steps per second against
those of the undisturbed seconds before. NOTHING ACKNOWLEDGED IS LOST: the ledger of the epochs must
say that each sample counted, and each worker adds 1 to a counter on the servers after each step and
notes the answer: the counter must be at least the number of answers, and at most that of additions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import figures
from harness.namespaces import can_shape
from harness.report import machine, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.cluster.host_job import HostJob
from support.cluster.ssh_cluster import SshCluster

_SHARDS = """
import os, time
import numpy as np
import torch, paceline as pl
pl.init()
# The servers keep it; the training below is small, so that its steps show every pause.
client = pl.ps.Client("async")
client.init("large", np.zeros(int(os.environ["NUMBERS"]), dtype=np.float32), "SGD", lr=0.1)
model = torch.nn.Linear(256, 256)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01), pace="ps")
began = time.time()
for step in pl.steps(1000000):
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    now = time.time()
    print("step", pl.rank(), began, now, flush=True)
    began = now
    if os.path.exists("finish"):
        break
"""
_CHAOS = """
import os, time
import numpy as np
import torch, paceline as pl
from torch.utils.data import DataLoader, TensorDataset
pl.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
loader = DataLoader(TensorDataset(torch.randn(1280, 64)), batch_size=8, shuffle=True)
client = pl.ps.Client("async")
has_counter = False
diary = open(f"diary-{pl.rank()}-{os.getpid()}.txt", "a", buffering=1)
def note(*words):
    print(time.time(), *words, file=diary)
for epoch in range(100000):
    for (batch,) in pl.shard(loader, epoch=epoch):
        note("batch", len(batch))
        model(batch).pow(2).mean().backward()
        try:
            optimizer.step()
        except SystemExit:  # a planned leave: this step has counted
            note("done", len(batch))
            raise
        optimizer.zero_grad()
        note("done", len(batch))
        if not has_counter:  # not before: a worker that joins can ask servers after its first step
            client.init("counter", np.zeros(1, dtype=np.float64), "SGD", lr=1.0)
            has_counter = True
        note("adds", 1)
        client.push("counter", -np.ones(1)).wait()  # plus 1: the server subtracts a gradient
        note("added", 1)
        time.sleep(0.1)
    if os.path.exists("finish"):
        break
print("counter", client.peek("counter").wait()[0], flush=True)
"""
_CALM_S = 20.0  # without events, before the first one
_LEFT = re.compile(r"host (\w+) has left after ([\d.]+) s")


def start(cluster: SshCluster, options: str, script: str) -> tuple[HostJob, Path]:
    directory = Path(tempfile.mkdtemp(dir=cluster.directory))
    return HostJob(cluster, directory, *options.split(), script=script), directory


def finish(job: HostJob, directory: Path) -> str:
    (directory / "finish").touch()
    if job.result(timeout_s=120):
        raise SystemExit(f"preemption: the job failed:\n{job.output[-6000:]}")
    return job.output


def steps(job: HostJob, ranks: set[str]) -> list[tuple[float, float]]:
    """Return begin and end of all steps of these ranks."""
    lines = [line.split("step ", 1)[1].split() for line in job.lines if "] step " in line]
    return [(float(a), float(b)) for rank, a, b in lines if rank in ranks]


def measure_shards(megabytes: int, *, show: bool) -> dict[str, float]:
    """Let a host with shards go away; return what it took, and what the others noticed."""
    with SshCluster("a", "b", "c") as cluster:
        options = "--hosts a:1,b:1,c:1 -s 2 --servers-on b,c --min 1 --threads-per-worker 1"
        # One half of the array is on each of the two servers.
        options += f" --preemption-deadline 30s --env NUMBERS={2 * megabytes * 250_000}"
        job, directory = start(cluster, options, _SHARDS)
        job.wait_for("] step ", timeout_s=240)
        time.sleep(10)
        noticed_s = time.time()
        job.signal(job.agent("c"), signal.SIGTERM)
        job.wait_for("host c has left after", timeout_s=60)
        left_s = time.time()
        time.sleep(3)
        text = finish(job, directory)
        if show:
            print("".join(line for line in job.lines if "] step " not in line))
        others = steps(job, {"0", "1"})
        before = [end - begin for begin, end in others if noticed_s - 6 < begin and end < noticed_s]
        during = [end - begin for begin, end in others if noticed_s < end < left_s + 1]
        found = _LEFT.search(text)
        assert found is not None
        return {
            "megabytes": megabytes,
            "hand-over s": float(found[2]),
            "median step s": statistics.median(before),
            "longest step before s": max(before),
            "longest step during s": max(during),
            "losses": len(job.losses),
            "repeated steps": text.count("exchanged again"),
        }


class Chaos:
    """Random notices and kills while a job trains."""

    def __init__(self, cluster: SshCluster, job: HostJob, seed: int) -> None:
        self._cluster, self._job, self._dice = cluster, job, random.Random(seed)
        self.notices = self.kills = self.skipped = 0

    def strike(self) -> None:
        """Give notice to a host, or kill a worker or server; bring a host back that has left."""
        gone = [name for name in "bcd" if not self._has_agent(name)]
        for name in gone:
            self._job.paceline("hosts", "add", f"{name}:2")
        present = [name for name in "bcd" if name not in gone]
        if self._dice.random() < 0.5 and len(present) > 1:
            self._job.signal(self._job.agent(self._dice.choice(present)), signal.SIGTERM)
            self.notices += 1
            return
        victims = [
            process
            for name in present
            for process in self._cluster[name].processes()
            if process.environ.get("RANK")
        ]
        if "fewer than" in self._job.paceline("status").stdout:
            victims = [one for one in victims if one.environ["PACELINE_ROLE"] == "worker"]
        if not victims:
            self.skipped += 1
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._dice.choice(victims).pid, signal.SIGKILL)
            self.kills += 1

    def _has_agent(self, name: str) -> bool:
        try:
            self._job.agent(name)
        except ValueError:
            return False
        return True


@dataclass
class Notes:
    """What all workers have noted, the killed ones too: by word, when and how many."""

    by_word: dict[str, list[tuple[float, int]]]

    @classmethod
    def read(cls, directory: Path) -> Notes:
        by_word: dict[str, list[tuple[float, int]]] = {}
        for path in directory.glob("diary-*.txt"):
            for line in path.read_text().splitlines():
                at, word, count = line.split()
                by_word.setdefault(word, []).append((float(at), int(count)))
        return cls(by_word)

    def total(self, word: str, begin_s: float = 0, end_s: float = float("inf")) -> int:
        return sum(count for at, count in self.by_word[word] if begin_s <= at < end_s)


def measure_chaos(seconds: float, events: int, seed: int, *, show: bool) -> dict[str, float]:
    """Train while hosts go away and processes are killed; return the share of useful work."""
    with SshCluster("a", "b", "c", "d") as cluster:
        options = "--hosts a:1,b:2,c:2,d:2 -n 4 -s 3 --replicas 2 --pace ps --min 1"
        options += " --threads-per-worker 1 --preemption-deadline 20s"
        job, directory = start(cluster, options, _CHAOS)
        job.wait_for("paceline: step", timeout_s=120)
        time.sleep(_CALM_S)
        chaos, pause_s, began_s = Chaos(cluster, job, seed), seconds / events, time.time()
        while (now_s := time.time()) < began_s + seconds:
            chaos.strike()
            time.sleep(max(0.0, now_s + pause_s - time.time()))
        ended_s = time.time()
        text = finish(job, directory)
        if show:
            print(text)
        notes = Notes.read(directory)
        calm = notes.total("done", began_s - _CALM_S + 5, began_s) / (_CALM_S - 5)
        counter = max(float(value) for value in re.findall(r"\] counter ([\d.]+)", text))
        epochs = re.findall(r"epoch \d+: ([\d,]+) samples, (each once|each at least once)", text)
        return {
            "seconds": seconds,
            "notices": chaos.notices,
            "kills": chaos.kills,
            "hosts left as planned": len(_LEFT.findall(text)),
            "losses": len(job.losses),
            "samples begun": notes.total("batch"),
            "efficiency": notes.total("done") / notes.total("batch"),
            "speed": notes.total("done", began_s, ended_s) / (ended_s - began_s) / calm,
            "additions begun": notes.total("adds"),
            "additions answered": notes.total("added"),
            "counter": counter,
            "epochs": len(epochs),
            "epochs with each sample": sum(count == "1,280" for count, _ in epochs),
            "epochs with each sample once": sum(
                count == "1,280" and words == "each once" for count, words in epochs
            ),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("shards", "chaos"))
    parser.add_argument("--megabytes", type=int, default=1000, help="on the host that goes away")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--events", type=int, default=12, help="notices and kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print what the jobs print")
    options = parser.parse_args()
    if why := can_shape():
        raise SystemExit(f"preemption: cannot run here: {why}")
    facts, content, rows = machine(), {}, []
    if options.only != "chaos":
        shards = content["shards"] = measure_shards(options.megabytes, show=options.show)
        longest, before = shards["longest step during s"], shards["longest step before s"]
        rows.append(("longest step during / before", "must 2 (one step more)", longest / before))
        rows.append(("the same, against the median", "", longest / shards["median step s"]))
        rows.append(("steps repeated", "must 0", shards["repeated steps"]))
        print(shards)
    if options.only != "shards":
        chaos = content["chaos"] = measure_chaos(
            options.seconds, options.events, options.seed, show=options.show
        )
        rows.append(("useful samples", "must 0.95, goal 0.98", chaos["efficiency"]))
        rows.append(("speed against undisturbed", "", chaos["speed"]))
        lost = chaos["additions answered"] - min(chaos["counter"], chaos["additions answered"])
        rows.append(("acknowledged additions lost", "must 0", lost))
        without = chaos["epochs"] - chaos["epochs with each sample"]
        rows.append(("epochs without each sample", "must 0", without))
        print(chaos)
    figures.show([(what, must, f"{value:.3f}") for what, must, value in rows])
    print(f"written to {write_json('preemption', {'machine': facts, **content})}")


if __name__ == "__main__":
    main()
