"""Scripts of Horovod's: started with horovodrun or --horovod, joined again, elastic, installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "horovod"
HOROVODRUN = [sys.executable, "-m", "paceline.cli.horovodrun"]
PACELINE = [sys.executable, "-m", "paceline", "run", "--log-dir", "none"]


def run(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=150)


SCRIPT = """
import os, sys
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import allreduce_async_, rank, synchronize
import torch

for turn in range(3):
    if turn == 1 and os.environ["HOROVOD_RANK"] == "0":
        import time; time.sleep(0.3)
    hvd.init()
    assert hvd.__name__ == "paceline.horovod.torch" and hvd.elastic.run
    assert os.environ["HOROVOD_RANK"] == str(hvd.rank())
    assert os.environ["HOROVOD_SIZE"] == str(hvd.size()) == "2"
    assert os.environ["HOROVOD_LOCAL_RANK"] == str(hvd.local_rank())
    x = hvd.allreduce(torch.ones(2) * hvd.rank(), name="x")
    net = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for _ in range(2):
        optimizer.zero_grad(); net(torch.ones(1, 2)).sum().backward(); optimizer.step()
    if turn == 0 and hvd.rank() == 0:
        hvd.start_timeline("own.json"); hvd.allreduce(x, name="seen"); hvd.stop_timeline()
    elif turn == 0:
        hvd.allreduce(x, name="seen")
    if hvd.rank() == 0:
        print("turn", turn, x.tolist(), sys.argv[1:], flush=True)
    hvd.shutdown()
    after = [hvd.rank, lambda: hvd.allreduce(torch.ones(1)), hvd.barrier, optimizer.step]
    for call in [*after, hvd.get_process_set_ids_and_ranks]:
        try:
            call()
        except ValueError as error:
            assert "has not been initialized" in str(error)
        else:
            raise AssertionError("worked after shutdown")
assert issubclass(HorovodInternalError, RuntimeError)

import gc  # joining and leaving over and over leaves nothing open
import paceline as pl
files = []
for turn in range(8):
    pl.init()
    net = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    pl.distribute(net, plain)
    net(torch.ones(1, 2)).sum().backward(); plain.step()
    pl.shutdown()
    gc.collect()
    files.append(len(os.listdir("/proc/self/fd")))
assert files[-1] <= files[2], files
try:
    net(torch.ones(1, 2)).sum().backward(); plain.step()
    raise AssertionError("stepped after shutdown")
except ValueError as error:
    assert "pl.shutdown()" in str(error)
try:
    import horovod.mxnet
except ImportError as error:
    assert "is not part of" in str(error)
"""


def test_horovodrun_runs_a_script_that_imports_horovod(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "horovod.py").write_text("raise SystemExit('the other Horovod')")
    options = ["-np", "2", "--verbose", "--fusion-threshold-mb", "64", "--gloo"]
    options += ["--timeline-filename", "line.json", "--output-filename", "logs"]
    done = run(
        *(*HOROVODRUN, *options, "python", "train.py", "--lr", "0.1"),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path / "real"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for turn in range(3):
        assert f"turn {turn} [0.5, 0.5] ['--lr', '0.1']" in done.stdout
    said = done.stdout + done.stderr
    assert "ignored, Paceline's engine needs no such setting: --fusion-threshold-mb, --gloo" in said
    assert "paceline.horovod, not the Horovod in" in said
    assert (tmp_path / "logs").is_dir()
    events = json.loads((tmp_path / "line.json").read_text())
    assert {"ALLREDUCE", "BROADCAST"} <= {event["name"] for event in events}
    assert json.loads((tmp_path / "own.json").read_text())[1]["tid"] == "seen"


def test_other_launchers_install_it_with_a_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run(*torchrun, "-m", "paceline.horovod", "train.py", "--lr", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "turn 2 [0.5, 0.5] ['--lr', '0.1']" in done.stdout


def test_horovodruns_command_line(tmp_path: Path) -> None:
    from paceline.cli.horovodrun import _parser, translate

    (tmp_path / "find").write_text("#!/bin/sh\necho a:2\necho b:2\n")
    (tmp_path / "find").chmod(0o755)
    for words, expected in [
        ("-np 4 -H a:2,b:2 python -u t.py x", "-n 4 --hosts a:2,b:2 t.py x"),
        ("-np 2 --min-np 1 --max-np 3 python3 -m mod -v", "-n 2 --min 1 --max 3 -m mod -v"),
        ("--hostfile h --cycle-time-ms 3 ./t.py", "--hostfile h ./t.py"),
        (f"-np 2 --host-discovery-script {tmp_path / 'find'} t.py", "-n 2 --hosts a:2,b:2 t.py"),
    ]:
        found = translate(_parser().parse_args(words.split()))
        assert found == ["run", "--horovod", *expected.split()]
    done = run(*HOROVODRUN, "--check-build", cwd=tmp_path)
    assert done.returncode == 0 and "[X] PyTorch" in done.stdout
    done = run(*HOROVODRUN, "-np", "2", cwd=tmp_path)
    assert done.returncode == 2 and "the command is missing" in done.stderr


@pytest.mark.parametrize("name", ["mnist.py", "synthetic_benchmark.py"])
def test_examples_run_with_their_old_import(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / name).read_text()
    assert text.count("paceline.horovod.torch") == 1
    (tmp_path / name).write_text(text.replace("paceline.horovod.torch", "horovod.torch"))
    arguments = ["--epochs", "4"] if name == "mnist.py" else ["--width", "128"]
    done = run(*HOROVODRUN, "-np", "2", "python", name, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "mnist.py":
        accuracies = re.findall(r"accuracy ([0-9.]+)%", done.stdout)
        assert float(accuracies[-1]) > 50
    else:
        assert "total on 2 processes" in done.stdout


def test_an_elastic_script_loses_a_worker_and_gets_another(tmp_path: Path) -> None:
    words = ["-n", "3", "--min", "2", "--max", "3", str(EXAMPLES / "elastic.py")]
    done = run(*PACELINE, *words, "--kill-rank-at", "12", "--epochs", "3", cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "continues with 2 workers" in said
    assert re.search(r"epoch 2: [23] workers, loss", said), said
