"""A notice that a host goes away becomes a planned leave: nothing is lost, and no step repeated.

Each test starts real training on several hosts. The notice comes from where clouds and schedulers
put it: a signal to the agent, an address or a file on the host that goes away.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from support.cluster.host_job import HostJob
from support.cluster.ssh_cluster import SshCluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

# The samples of an epoch are counted by the ledger: the line at its end.
TRAIN = """
import os, time
import torch, paceline as pl
from torch.utils.data import DataLoader, TensorDataset
pl.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
data = TensorDataset(torch.randn(1280, 4))
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(int(os.environ.get("EPOCHS", "2"))):
    for step, (batch,) in enumerate(pl.shard(loader, mode=os.environ.get("MODE", "shard"))):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, flush=True)
        if pl.should_stop():
            print("saved", flush=True)
            raise SystemExit(75)
        time.sleep(float(os.environ.get("SLEEP", "0.05")))
print("done", pl.rank(), flush=True)
"""
ONCE = "1,280 samples, each once\n"
NOTICE = "127.0.0.1:8070"  # on each host
SERVE = f"""
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200, "secret")
    def do_GET(self):
        if self.headers["X-aws-ec2-metadata-token"] != "secret":
            self.answer(401, "")
        elif self.path != "/latest/meta-data/spot/instance-action":
            self.answer(404, "")
        else:
            self.answer(200, json.dumps({{"action": "terminate", "in_s": 20}}))
    def answer(self, code, text):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())
host, port = "{NOTICE}".split(":")
http.server.HTTPServer((host, int(port)), Answer).serve_forever()
"""


def start(cluster: SshCluster, directory: Path, options: str, **env: str) -> HostJob:
    words = [*options.split(), *(w for k, v in env.items() for w in ("--env", f"{k}={v}"))]
    job = HostJob(cluster, directory, *words, script=TRAIN)
    job.wait_for("step 10")
    return job


def expect_nothing_lost(job: HostJob, epochs: int = 2) -> None:
    assert job.result() == 0, job.output
    assert not job.losses, job.output
    assert job.output.count(ONCE) == epochs, job.output
    assert "exchanged again" not in job.output, job.output
    assert "no step repeated" in job.output, job.output


def test_a_spot_notice_moves_workers_and_shards_to_other_hosts(
    cluster: SshCluster, tmp_path: Path
) -> None:
    options = (
        f"--hosts a:2,b:2,c:2 -n 4 -s 2 --pace ps --min 1 --preemption-notice aws=http://{NOTICE}"
    )
    job = start(cluster, tmp_path, options)
    server = cluster["b"].popen([sys.executable, "-c", SERVE])  # nothing has answered before
    try:
        job.wait_for("(AWS spot notice (terminate)): ranks 2-3 and server 1")
        took_s = job.wait_for("host b has left after")
        assert took_s < 15
        line = next(line for line in job.lines if "host b has left" in line)
        assert "server 1 with" in line and "no step is repeated" in line, job.output
    finally:
        os.kill(cluster["b"].pid_of(server), signal.SIGKILL)
        server.wait()
    job.wait_until_gone("b")
    expect_nothing_lost(job)
    assert sum("] done" in line for line in job.lines) == 4, "replacements on c took over"


def test_sigterm_to_an_agent_shrinks_the_job_if_there_is_no_room(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, "--hosts a:2,b:1,c:1 --min 1 --preemption-deadline 20s")
    job.signal(job.agent("b"), signal.SIGTERM)
    job.wait_for("host b goes away in 20 s (its agent got SIGTERM)")
    job.wait_for("host b has left after")
    job.signal(job.agent("c"), signal.SIGTERM)
    job.wait_for("host c has left after")
    expect_nothing_lost(job)


def test_a_notice_for_all_saves_and_ends_with_75(cluster: SshCluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path, "--hosts b:1,c:1 --min 1")
    for host in ("b", "c"):
        job.signal(job.agent(host), signal.SIGTERM)
    assert job.result() == 75, job.output
    assert "the job saves and stops" in job.output
    assert "] saved" in job.output
    assert not job.losses, job.output


@pytest.mark.cluster
def test_a_notice_can_be_withdrawn(cluster: SshCluster, tmp_path: Path) -> None:
    notice = "/dev/shm/preempt"  # each host has its own
    options = f"--hosts a:1,b:2 --min 1 --preemption-notice file:{notice}"
    (tmp_path / "train.py").write_text(TRAIN)
    job = HostJob(cluster, tmp_path, *options.split(), "--env", "SLEEP=15", script=TRAIN)
    job.wait_for("step 0")

    def write(text: str) -> None:
        cluster["b"].run(
            ["sh", "-c", f"cat > {notice}.new && mv {notice}.new {notice}"], input=text
        )

    write('{"in_s": 40, "why": "maintenance"}')
    job.wait_for("host b goes away in 40 s (maintenance): ranks 1-2 hand over and leave")
    shown = job.paceline("hosts").stdout
    assert "b (2 slots): ranks 1-2; leaving: maintenance" in shown, f"{shown}\n{job.output}"
    cluster["b"].run(["rm", str(notice)])
    job.wait_for("host b stays: the notice (maintenance) was withdrawn")
    # What was out of the membership by then leaves after its step, and comes back.
    job.wait_for("3 workers from step", timeout_s=90)
    job.interrupt()
    job.result()
    assert not job.losses, job.output
