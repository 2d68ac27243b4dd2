"""examples/cluster: the script trains and resumes, and the files around it say what is true."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is an extra")
ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
PACELINE = [sys.executable, "-m", "paceline"]


def run(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120
    )


def test_the_script_trains_and_resumes(tmp_path):
    command = (*PACELINE, "run", *["-n", "2", "-s", "1", "--pace", "ssp:3", "--log-dir", "none"])
    script = (str(CLUSTER / "train.py"), "--saved", "saved", "--steps")
    first = run(*command, *script, "50", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert first.returncode == 0, first.stdout + first.stderr
    second = run(*command, *script, "60", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "resumes from saved/step-000000050" in second.stdout + second.stderr
    loss = re.search(r"step 60: loss ([0-9.]+)", second.stdout)
    assert loss and float(loss[1]) < 1.5  # 2.3 is a guess among ten digits


def test_the_manifests_are_those_that_are_printed():
    text = (CLUSTER / "jobset.yaml").read_text()
    head = "".join(line[1:].rstrip("\\\n") for line in text.splitlines(True)[1:4])
    words = shlex.split(head.strip())
    assert words[0] == "paceline"
    done = run(*PACELINE, *words[1:], cwd=CLUSTER)
    assert done.returncode == 0, done.stderr
    assert list(yaml.safe_load_all(text)) == list(yaml.safe_load_all(done.stdout))
    assert "kind: Secret" not in text  # --secret names one that exists


def test_the_image_copies_files_that_are_there():
    text = (CLUSTER / "Containerfile").read_text()
    sources = [
        word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]
    ]
    assert len(sources) == 7 and all((ROOT / source).exists() for source in sources)
    assert "USER 1000:1000" in text


def test_skypilots_command_is_one_of_ours(tmp_path):
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    show = f"paceline() {{ {shlex.join([sys.executable, '-c'])} "
    show += "'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"; }\n"
    environ = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "0"}
    done = run("bash", "-c", show + task["run"], cwd=ROOT, **environ)
    words = json.loads(done.stdout)
    assert "10.0.0.1:4,10.0.0.2:4" in words and "10.0.0.1,10.0.0.2" in words
    plan = run(*PACELINE, "run", "--dry-run", *words[1:], cwd=ROOT)
    assert plan.returncode == 0 and "host 10.0.0.2 (4 slots)" in plan.stdout, plan.stderr
    other = run(
        "bash", "-c", show + task["run"], cwd=ROOT, **{**environ, "SKYPILOT_NODE_RANK": "1"}
    )
    assert (other.returncode, other.stdout) == (0, "")
