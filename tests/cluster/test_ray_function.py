"""`pl.ray.run` and `ray job submit` on a real cluster of Ray."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.cluster.ray_job import RayJob

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

# A user's program: functions of __main__, arguments, results, a checkpoint, and a dataset of Ray.
PROGRAM = """
import json, socket, sys, threading
import torch
import paceline as pl

def train(slope, directory):
    pl.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = pl.distribute(model, optimizer, pace="ps")
    checkpoint = pl.Checkpoint(directory, every=10)
    for step in pl.steps(20):
        x = torch.linspace(-1, 1, 8).unsqueeze(1)
        (model(x) - slope * x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
    return {"host": socket.gethostname(), "weight": model.weight.detach(), "rank": pl.rank()}

def count(data):
    pl.init()
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    seen = [batch["id"].tolist() for batch in pl.shard(loader, mode="dynamic", pad=False)]
    return sum(seen, [])

def fail():
    pl.init()
    if pl.rank() == 1:
        raise ValueError("no such luck")

if __name__ == "__main__":
    what = sys.argv[1]
    if what == "train":
        result = pl.ray.run(
            train, 3.0, sys.argv[2], workers=(2, 3), servers=2, replicas=2,
            resources={"CPU": 1}, placement="spread",
        )
        answer = {
            "hosts": [one["host"] for one in result.values.values()],
            "ranks": list(result.values),
            "weights": [one["weight"].item() for one in result.values.values()],
            "is_tensor": isinstance(result.value["weight"], torch.Tensor),
            "run": str(result.run_directory),
            "checkpoint": str(result.checkpoint),
        }
    elif what == "data":
        import ray
        ray.init(log_to_driver=False)
        data = pl.ray.batches(ray.data.range(100), batch_size=8)
        result = pl.ray.run(count, data, workers=2)
        answer = {"rows": sorted(sum(result.values.values(), [])), "batches": len(data)}
    else:
        lock = threading.Lock()
        tries = {"fail": fail, "lock": lambda: lock, "result": lambda: threading.Lock()}
        try:
            pl.ray.run(tries[what], workers=2)
        except pl.PacelineError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    print("ANSWER", json.dumps(answer))
"""


@pytest.fixture
def bench(ray_hosts, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    made = RayJob(ray_hosts, tmp_path)
    yield made
    made.close()
    ray_hosts.wait_until_free()


def call(bench: RayJob, *words: str):
    """Run the program; return its answer."""
    bench.start_command(bench.cluster.python, "program.py", *words)
    assert bench.finish(within_s=120) == 0, bench.text
    (line,) = (line for line in bench.lines if line.startswith("ANSWER"))
    return json.loads(line.removeprefix("ANSWER"))


def test_a_function_is_shipped_and_its_results_come_back(bench: RayJob):
    answer = call(bench, "train", str(bench.directory / "saved"))
    assert answer["ranks"] in ([0, 1], [0, 1, 2]) and answer["is_tensor"]
    assert len(set(answer["hosts"])) >= 2
    assert all(1 < weight < 3.1 for weight in answer["weights"]), answer
    assert (Path(answer["run"]) / "events.jsonl").exists()
    assert Path(answer["checkpoint"]).is_dir() and "saved" in answer["checkpoint"]


def test_batches_of_a_ray_dataset_come_once(bench: RayJob):
    answer = call(bench, "data")
    assert answer == {"rows": list(range(100)), "batches": 13}


def test_one_report_if_a_function_fails_or_cannot_be_shipped(bench: RayJob):
    error = call(bench, "fail")["error"]
    assert error.startswith("LaunchError: the job on Ray ended with exit code 1")
    assert "rank 1 failed first" in error and "ValueError: no such luck" in error
    error = call(bench, "lock")["error"]
    assert error.startswith("UsageError: pl.ray.run: ") and "cannot be shipped" in error
    assert "returned lock, which Ray cannot ship" in call(bench, "result")["error"]


def test_a_submitted_job_runs_and_stops(bench: RayJob):
    """`ray job submit` copies the directory to the nodes; `ray job stop` leaves nothing."""
    cluster, words = bench.cluster, ["--env", "STEPS=25", "-n", "2", "--placement", "spread"]
    submit = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--working-dir", "."]
    run = ["python", "-m", "paceline", "run", "--on", "ray", "--log-dir", "none"]
    bench.start_command(*submit, "--", *run, *words, "train.py")
    assert bench.finish(within_s=120) == 0, bench.text
    assert bench.text.count("] weights ") == 2 and "succeeded" in bench.text
    name = f"stopped-{time.time_ns()}"
    words = ["-n", "2", "--placement", "spread", "train.py"]
    bench.start_command(*submit, "--submission-id", name, "--", *run, *words)
    bench.wait_for(lambda: len(bench.hosts_of_workers()) == 2)
    stop = ["ray", "job", "stop", "--address", "http://127.0.0.1:8265", name]
    stopped = cluster.run("a", *stop)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    bench.finish(within_s=30)
