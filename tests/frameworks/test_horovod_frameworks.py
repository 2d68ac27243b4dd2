"""paceline.horovod.tensorflow and .keras against real ranks, and scripts in Horovod's style."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from environment import ROOT, assert_passed, require, run_script

EXAMPLES = ROOT / "examples" / "horovod"
TENSORFLOW = ("values", "gradients", "tape", "rules", "batch_norm", "again")
KERAS = (
    "equals_one_process",
    "half_and_adam",
    "uneven_steps",
    "inf_on_one_worker",
    "learning_rates",
    "values_and_refusals",
    "any_pace",
)


def test_operations_and_the_tape_of_tensorflow() -> None:
    require("tensorflow", "keras")
    assert_passed(run_script("horovod_tensorflow_checks.py", *TENSORFLOW), *TENSORFLOW)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_an_optimizer_of_keras(backend: str) -> None:
    require("keras", "tensorflow", *(["jax"] if backend == "jax" else []))
    ended = run_script("horovod_keras_checks.py", *KERAS, env={"KERAS_BACKEND": backend})
    assert_passed(ended, *KERAS)


@pytest.mark.slow
def test_keras_on_servers_with_one_argument() -> None:
    require("keras", "tensorflow")
    ended = run_script("horovod_keras_checks.py", "served", options=("-n", "2", "-s", "1"))
    assert_passed(ended, "served")


def run_unchanged(
    name: str, tmp_path: Path, *arguments: str, backend: str = "tensorflow", workers: str = "2"
) -> str:
    """Run an example as it was before its import was changed, and return what it printed."""
    text = (EXAMPLES / name).read_text()
    assert text.count("import paceline.horovod") == 1
    script = tmp_path / name
    script.write_text(text.replace("import paceline.horovod", "import horovod"))
    ended = run_script(
        str(script),
        *arguments,
        options=("-n", workers, "--horovod"),
        env={"KERAS_BACKEND": backend},
        cwd=tmp_path,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("tensorflow2_mnist.py", "tensorflow"),
        ("tensorflow2_keras_mnist.py", "tensorflow"),
        ("keras_mnist.py", "torch"),
        ("keras_mnist.py", "jax"),
    ],
)
def test_a_script_learns_with_its_old_import(name: str, backend: str, tmp_path: Path) -> None:
    require("keras", "tensorflow", "sklearn", *(["jax"] if backend == "jax" else []))
    saved = ["--checkpoint", "model.keras"] if name.startswith("tensorflow2") else []
    said = run_unchanged(name, tmp_path, *saved, backend=backend)
    found = re.findall(r"accuracy ([0-9.]+)%", said)
    assert float(found[-1]) > 80, said
    assert not saved or (tmp_path / "model.keras").exists()


@pytest.mark.slow
def test_the_synthetic_benchmark(tmp_path: Path) -> None:
    require("tensorflow")
    arguments = ["--width", "128", "--fp16-allreduce"]
    said = run_unchanged("tensorflow2_synthetic_benchmark.py", tmp_path, *arguments)
    assert "total on 2 processes" in said


@pytest.mark.slow
def test_an_elastic_script_of_keras_loses_a_worker_and_gets_another(tmp_path: Path) -> None:
    require("keras", "tensorflow", "sklearn")
    ended = run_script(
        str(EXAMPLES / "tensorflow2_keras_elastic.py"),
        *("--kill-rank-at", "7", "--until-joined"),
        options=("-n", "3", "--min", "2", "--max", "3"),
        env={"KERAS_BACKEND": "tensorflow"},
        cwd=tmp_path,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-6000:]
    shown = ended.stdout
    lost, joined = shown.index("continues with 2 workers"), shown.index("continues with 3 workers")
    assert lost < joined, shown[-3000:]
    assert re.search(r"epoch \d+: 3 workers, accuracy", shown[joined:]), shown[-3000:]
