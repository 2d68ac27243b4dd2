"""A process of a model in parts is killed: its unit goes with it, and is replaced as a whole.

Under the real launcher, with real models on a mesh. The workers tell the state of their part behind
every step; those who hold the same part must agree on it, whoever came and went.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

_BEGIN = """
    import hashlib, os, signal, sys, time
    import torch
    import paceline as pl
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    job = pl.init()
    torch.manual_seed(0)
    data = torch.randn(512, 8)
    labels = (data @ torch.randn(8, 4)).argmax(1)
    loader = DataLoader(TensorDataset(data, labels), batch_size=16, shuffle=True)
    layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = pl.distribute(
        model, optimizer, loss=F.cross_entropy, example=data[:16], microbatches=2
    )
    place, unit = job.mesh.unit_index(job.env.number), job.mesh.unit_of(job.env.number)

    def state():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = b"".join(p.detach().contiguous().numpy().tobytes() for p in params)
        return hashlib.blake2b(held, digest_size=8).hexdigest()

    def tell(loss):
        units = job.data_parallel_view.world.size
        print(f"step {job.steps_done} place {place} unit {unit} of {units}: {state()} {loss:.5f}")
"""

# Until the lost unit has been back for some steps, which everybody counts alike.
_REPLACED = (
    _BEGIN
    + """
    is_held, steps_back = sys.argv[1] == "replace", 0
    while steps_back < 10:
        for x, y in pl.shard(loader):
            changes = job.elastic.num_changes  # behind a loss, and behind a boundary
            tell(float(model.train_step(x, y).detach()))
            if job.steps_done == 10 and job.env.rank < 4:
                open(f"done-{job.env.rank}", "w").close()
            if job.steps_done == 10 and job.env.rank == 3:
                while not all(os.path.exists(f"done-{rank}") for rank in range(4)):
                    time.sleep(0.01)  # nobody is still in this step when one dies
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
            is_back = job.elastic.num_changes == 1 if is_held else changes == 2
            steps_back += job.env.is_newcomer or is_back
            if steps_back == 10:
                break
"""
)

_RESTARTED = (
    _BEGIN
    + """
    checkpoint = pl.Checkpoint("saved", every=5)
    for epoch in pl.epochs(3):
        for x, y in pl.shard(loader, epoch=epoch):
            tell(float(model.train_step(x, y).detach()))
            checkpoint.step()
            if checkpoint.steps == 12 and job.env.rank == 1 and checkpoint.path is None:
                while not os.path.exists("saved/step-000000010"):
                    time.sleep(0.01)  # the other one publishes it
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"done behind {checkpoint.steps}")
"""
)


def _run(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    (tmp_path / "runtime").mkdir(mode=0o700)
    arguments = [*options[:-1], "train.py", options[-1]]
    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", *arguments],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _told(output: str) -> dict[tuple[int, int], dict[int, tuple[int, str, float]]]:
    """By step and place: what each unit told: how many units there were, its state, its loss."""
    found: dict[tuple[int, int], dict[int, tuple[int, str, float]]] = defaultdict(dict)
    for words in re.findall(r"step (\d+) place (\d) unit (\d) of (\d): (\w+) (\S+)", output):
        step, place, unit, units = map(int, words[:4])
        found[step, place][unit] = (units, words[4], float(words[5]))
    return found


@pytest.mark.parametrize(
    ("mesh", "on_loss"),
    [
        ("dp=2,tp=2", "shrink"),
        pytest.param("dp=2,tp=2", "replace", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2", "shrink", marks=pytest.mark.slow),
        ("dp=2,pp=2", "replace"),
        ("dp=2,fsdp=2", "shrink"),
        pytest.param("dp=2,fsdp=2", "replace", marks=pytest.mark.slow),
    ],
)
def test_a_unit_is_replaced_from_its_peers(tmp_path: Path, mesh: str, on_loss: str) -> None:
    """Each kind of mesh, and each answer to a loss; the other pairs of them are slow tests."""
    options, is_held = ["--mesh", mesh, "--min", "2", "--on-loss", on_loss], on_loss == "replace"
    ended = _run(tmp_path, _REPLACED, *options, on_loss)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    goes_on = "the other workers hold their step until" if is_held else "continuing with 2 workers"
    words = f"lost: killed by signal 9; worker 2 of its unit is retired with it; {goes_on}"
    assert words in ended.stderr
    assert "1 loss (worker 3), 1 replaced" in ended.stderr
    told = _told(ended.stdout)
    last = max(step for step, _ in told)
    for (step, place), by_unit in told.items():
        states = {state for _, state, _ in by_unit.values()}
        assert len(states) == 1, f"step {step}, place {place}: {by_unit}"
        assert len({units for units, _, _ in by_unit.values()}) == 1
        assert all(loss == loss and loss < 10 for _, _, loss in by_unit.values())
    for place in (0, 1):  # no step is left out, and at the end both units are there
        assert [step for step, where in sorted(told) if where == place] == list(range(1, last + 1))
        assert set(told[last, place]) == {0, 1}
        assert set(told[11, place]) == ({0, 1} if is_held else {0})


# The links of worker 3 break; it is killed only when worker 2 has died of that.
_NOTICED_FIRST = (
    _BEGIN
    + """
    import socket

    def break_links():
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                sock = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue  # not a socket, or closed by now
            with sock:
                is_local = sock.family == socket.AF_UNIX
                if is_local and sock.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED):
                    sock.shutdown(socket.SHUT_RDWR)  # a link of the engine's

    def is_dead(pid):
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"

    open(f"pid-{job.env.rank}", "w").write(str(os.getpid()))
    for x, y in pl.shard(loader):
        tell(float(model.train_step(x, y).detach()))
        if job.steps_done == 3 and job.env.rank == 3:
            break_links()
            while not is_dead(int(open("pid-2").read())):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if job.steps_done == 8:
            break
"""
)


def test_a_mate_that_notices_a_loss_before_anybody_else_is_replaced_too(tmp_path: Path) -> None:
    options = ["--mesh", "dp=2,pp=2", "--on-loss", "replace"]
    ended = _run(tmp_path, _NOTICED_FIRST, *options, "")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "PeerLost" in ended.stderr, "worker 2 has ended with an error of its own accord"
    # Worker 2 is named if worker 3 lives on for more than a moment, on a busy machine.
    assert re.search(r"1 loss \(worker [23]\), 1 replaced", ended.stderr)
    assert {unit for (step, _), by in _told(ended.stdout).items() for unit in by if step == 8} == {
        0,
        1,
    }


def test_the_only_unit_starts_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    ended = _run(tmp_path, _RESTARTED, "--mesh", "tp=2", "--restarts", "1", "")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert re.search(
        r"too few workers are left after the loss of worker 1 .*: restarting all processes from the"
        r" last checkpoint \(restart 1 of 1\)",
        ended.stderr,
    )
    assert "resumes from saved/step-000000010, after step 10" in ended.stderr
    assert ended.stdout.count("done behind 96") == 2


def test_without_restarts_the_end_says_what_would_have_helped(tmp_path: Path) -> None:
    ended = _run(tmp_path, _RESTARTED, "--mesh", "tp=2", "--on-loss", "shrink", "")
    assert ended.returncode == 128 + 9
    assert "0 workers are left, expected at least 2 (--min): worker 1 (" in ended.stderr
    assert "a mesh with dp of at least 2, or with --restarts 1 and a checkpoint" in ended.stderr


_FAILS = (
    _BEGIN
    + """
    for x, y in pl.shard(loader):
        tell(float(model.train_step(x, y).detach()))
        if job.steps_done == 5 and job.env.rank == 1:
            raise ValueError("a mistake of the script")
"""
)


def test_an_error_of_the_script_ends_the_job_also_when_its_mates_are_gone_first(
    tmp_path: Path,
) -> None:
    # Servers end what shares their memory and is no longer in the job: here the mate.
    options = ["--mesh", "dp=2,tp=2", "--min", "2", "-s", "1", "--pace", "ps"]
    ended = _run(tmp_path, _FAILS, *options, "")
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert "rank 1 failed first" in ended.stderr
    assert "ValueError: a mistake of the script" in ended.stderr.partition("failed first")[2]
    assert "lost: " not in ended.stderr
