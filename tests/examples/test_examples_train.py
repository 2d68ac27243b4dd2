"""The examples run, learn, and train alike however many workers there are and whoever starts them.

Scripts that run alone are forked with torch loaded; those under a launcher are started as a person
would. All run in a copy of the examples, without the book that `fetch_book.py` fetches.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import run_processes
from support.environs import base_environ

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# For one process. Two workers get half the batch size, which makes the same global batch.
SHORT = {
    "digits": ["--epochs", "5", "--batch-size"],
    "gpt": ["--epochs", "2", "--chars", "30000", "--batch-size"],
    "resnet": ["--epochs", "3", "--batch-size"],
}
BATCH = {"digits": 64, "gpt": 16, "resnet": 64}
# Between one process and two workers the gradients of a batch are added up in another order, which
# is all that differs: in float32 a few units in the last place for each step. Training makes that
# grow; batch norms do so by several percents within 50 steps, so that the ResNet is computed in
# double precision here. The losses are printed with four digits behind the point.
TOLERANCE = {"digits": 2e-4, "gpt": 2e-3, "resnet": 2e-4}
SEED = "    torch.manual_seed(0)\n"
DOUBLE = {
    ".float()[:, None]": ".double()[:, None]",
    SEED: f"{SEED}    torch.set_default_dtype(torch.float64)\n",
}

Curve = list[float]


def losses(output: str, mark: str = "") -> Curve:
    """Return the test losses that were printed, of the rank whose lines begin with the mark."""
    found = re.findall(rf"{re.escape(mark)}epoch \d+: test loss ([\d.]+)", output)
    return [float(loss) for loss in found]


def command(examples: Path, script: str, workers: int = 1) -> list[str]:
    name = script.split("/")[0]
    return [str(examples / script), *SHORT[name], str(BATCH[name] // workers)]


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("project") / "examples"
    shutil.copytree(EXAMPLES, target, ignore=shutil.ignore_patterns("__pycache__"))
    for script in target.glob("resnet/*.py"):
        text = script.read_text()
        for old, new in DOUBLE.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        script.write_text(text)
    return target


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("runtime"))


def run_forked(commands: list[list[str]], environs: list[dict[str, str]]) -> list[str]:
    def body(number: int) -> None:
        sys.argv = commands[number]
        runpy.run_path(commands[number][0], run_name="__main__")

    outcomes = run_processes(body, environs, timeout_s=110)
    assert [o.status for o in outcomes] == [0] * len(outcomes), "\n".join(map(str, outcomes))
    return [outcome.output for outcome in outcomes]


@pytest.fixture(scope="module")
def alone(examples, directory) -> dict[str, str]:
    """What every script prints when it is the only process."""
    scripts = [f"{name}/{half}.py" for name in SHORT for half in ("before", "after")]
    commands = [command(examples, script) for script in scripts]
    outputs = run_forked(commands, [base_environ(directory)] * len(scripts))
    return dict(zip(scripts, outputs, strict=True))


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("half", ["before", "after"])
def test_a_script_alone_learns(alone, name, half):
    output = alone[f"{name}/{half}.py"]
    curve = losses(output)
    assert len(curve) == int(SHORT[name][1]), output
    assert curve[-1] < curve[0]
    if name == "gpt":
        assert output.startswith("moby-dick-excerpt.txt: 30000 characters")
        assert curve[-1] < 3.2  # 4.3 is what guessing gives
    else:
        (accuracy,) = re.findall(r"accuracy ([\d.]+)\s*$", output)
        assert float(accuracy) > 0.8  # guessing: 0.1


@pytest.mark.parametrize(
    "name", ["digits", *(pytest.param(n, marks=pytest.mark.slow) for n in SHORT if n != "digits")]
)
def test_two_workers_train_as_one_process_with_the_global_batch(examples, alone, name):
    script = command(examples, f"{name}/after.py", workers=2)
    output = run("-m", "paceline", "run", "-n", "2", *script)
    first, second = losses(output, "[0] "), losses(output, "[1] ")
    assert first == second, "the workers have the same model"
    assert first == pytest.approx(losses(alone[f"{name}/after.py"]), abs=TOLERANCE[name])


@pytest.mark.parametrize(
    ("mesh", "batch"),
    [
        ("tp=2", 16),
        pytest.param("pp=2", 16, marks=pytest.mark.slow),
        pytest.param("fsdp=2", 8, marks=pytest.mark.slow),  # each has batches of its own
    ],
)
def test_a_model_in_parts_trains_as_the_whole_one(examples, directory, tmp_path, mesh, batch):
    script = [str(examples / "mesh/train.py"), "--chars", "12000"]
    (alone,) = run_forked([[*script, "--batch-size", "16"]], [base_environ(directory)])
    ((number, whole),) = re.findall(r"(\d+) of (\d+) parameters are here", alone)
    assert number == whole

    def curve(output: str, mark: str = "") -> list[float]:
        (found,) = re.findall(
            rf"{re.escape(mark)}epoch 1: loss ([\d.]+), test loss ([\d.]+)", output
        )
        return [float(loss) for loss in found]

    saved = tmp_path / "model.pt"
    script += ["--batch-size", str(batch), "--save", str(saved)]
    output = run("-m", "paceline", "run", "--mesh", mesh, *script)
    held = [int(one) for one in re.findall(rf"(\d+) of {whole} parameters are here", output)]
    assert len(held) == 2 and max(held) < 0.6 * int(whole)
    first, second = curve(output, "[0] "), curve(output, "[1] ")
    assert first == second, "both processes are told the same"
    assert first == pytest.approx(curve(alone), abs=TOLERANCE["gpt"])
    state = torch.load(saved, weights_only=True)
    assert sum(tensor.numel() for tensor in state.values()) == int(whole)


@pytest.mark.parametrize("mesh", ["pp=2", "fsdp=2"])
def test_a_model_that_no_process_holds_whole_is_trained(examples, mesh):
    script = str(examples / "too_large/train.py")
    output = run("-m", "paceline", "run", "-n", "2", script, "--mesh", mesh, "--steps", "1")
    told = re.findall(r"process \d: (\d+) of (\d+) parameters, \d+ MB at most", output)
    assert len(told) == 2 and all(int(here) <= 0.6 * int(whole) for here, whole in told)


def test_a_pace_from_outside_the_package(examples):
    output = run("-m", "paceline", "run", "-n", "3", str(examples / "own_pace.py"))
    found = [float(loss) for loss in re.findall(r"worker \d: loss ([\d.]+)", output)]
    assert len(found) == 3 and max(found) < 0.1  # 8 before the first step


def test_a_codec_from_outside_the_package(examples):
    output = run("-m", "paceline", "run", "-n", "2", str(examples / "own_codec.py"))
    found = [float(loss) for loss in re.findall(r"worker \d: loss ([\d.]+)", output)]
    assert len(found) == 2 and max(found) < 0.1


@pytest.mark.parametrize(
    ("pace", "updates"), [pytest.param("async", 440, marks=pytest.mark.slow), ("ps", 220)]
)
def test_numpy_learns_on_a_parameter_server(examples, pace, updates):
    script = str(examples / "ps_logistic.py")
    output = run(
        *("-m", "paceline", "run", "-n", "2", "-s", "1", script, "--epochs", "10", "--pace", pace)
    )
    ((count, accuracy),) = re.findall(r"(\d+) updates: accuracy ([\d.]+)", output)
    assert int(count) == updates
    assert float(accuracy) > 0.9  # guessing: 0.1


def test_torchrun_starts_the_same_file(examples, alone, tmp_path):
    script = command(examples, "digits/after.py", workers=2)
    # It leaves a directory for logs behind, wherever that is.
    torchrun = ("torch.distributed.run", "--standalone", f"--log-dir={tmp_path}")
    output = run("-m", *torchrun, "--nproc-per-node=2", *script)
    expected = losses(alone["digits/after.py"])
    # Both workers write to one pipe, so that their lines mix.
    both = sorted(losses(output))
    assert both == pytest.approx(sorted([*expected, *expected]), abs=TOLERANCE["digits"])


def test_mpirun_starts_the_same_file(examples, alone, directory):
    """In the environment that Open MPI makes; it is not needed for that."""
    script = command(examples, "digits/after.py", workers=2)
    environs = [
        {
            **base_environ(directory),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "examples",
        }
        for rank in range(2)
    ]
    expected = losses(alone["digits/after.py"])
    for output in run_forked([script, script], environs):
        assert losses(output) == pytest.approx(expected, abs=TOLERANCE["digits"])


def test_the_gpt_reads_the_whole_book_when_it_is_there(examples, directory):
    book = examples.parent / "data" / "moby-dick.txt"
    book.parent.mkdir()
    book.write_text("The whale swims. " * 500)
    script = [str(examples / "gpt/before.py"), "--chars", "6000"]
    try:
        (output,) = run_forked([script], [base_environ(directory)])
    finally:
        book.unlink()
    assert output.startswith("moby-dick.txt: 6000 characters, 11 different ones")
