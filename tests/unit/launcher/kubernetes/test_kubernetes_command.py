"""`paceline run --on kubernetes`: what it prints, what it gives to kubectl, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main

IMAGE = ("--on", "kubernetes", "--image", "registry.example.org/train:1")
# Keeps what it gets, refuses what `refuses` says, and knows JobSet if `jobset` is there.
KUBECTL = """\
#!/bin/sh
cd {directory}
echo "$@" >>calls
case "$*" in
  *api-resources*) [ ! -e jobset ] || echo jobsets.jobset.x-k8s.io; exit 0;;
  *create*) cat >last; kind=$(grep -m1 '"kind": "[SJT][a-zS]*"' last | cut -d'"' -f4)
    if [ "$kind" = "$(cat refuses 2>/dev/null)" ]; then
      echo 'Error from server (Forbidden): jobs.batch is forbidden: User "eve" cannot create' >&2
      exit 1
    fi
    cat last >>created; echo "$kind/train" | tr A-Z a-z;;
esac
"""


class Desk:
    """A directory with a kubectl of its own, without a script: that is in the image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        tool = path / "bin" / "kubectl"
        tool.parent.mkdir()
        tool.write_text(KUBECTL.format(directory=path))
        tool.chmod(0o755)
        self.search = f"{tool.parent}:/usr/bin:/bin"

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline", "run", *words]
        environ = {**os.environ, "PATH": self.search}
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.path, env=environ, timeout=60
        )

    def read(self, name: str) -> str:
        return (self.path / name).read_text()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_job_is_created(desk):
    (desk.path / "jobset").touch()
    options = (*IMAGE, "-n", "4", "-N", "2", "-s", "2", "--pace", "ssp:3", "--name", "train")
    done = desk.run(*options, "--namespace", "team-a", "--env", "LR=1", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    assert "created secret/train, jobset/train" in done.stdout
    assert "kubectl logs -n team-a -f -l app.kubernetes.io/instance=train" in done.stdout
    created = desk.read("created")
    assert '"kind": "JobSet"' in created and '"namespace": "team-a"' in created
    secret = json.loads(created[: created.index("\n}\n") + 3])["items"][0]["stringData"]["secret"]
    assert len(bytes.fromhex(secret)) == 32
    assert secret not in done.stdout + done.stderr + desk.read("calls")
    jobset = json.loads(created[created.index("\n}\n") + 3 :])["items"][0]
    roles = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    assert {role: spec["completions"] for role, spec in roles.items()} == {
        **{"coordinator": 1, "worker": 2, "server": 2}
    }
    words = roles["coordinator"]["template"]["spec"]["containers"][0]["command"]
    inside = words[words.index("run") + 1 :]
    assert inside == [
        *("-n", "4", "-s", "2", "--pace=ssp:3", "--env=LR=1", "--grace=45"),
        *("train.py", "--lr", "0.1"),
    ]


def test_what_was_created_before_a_refusal_is_deleted(desk):
    (desk.path / "refuses").write_text("Job")
    done = desk.run(*IMAGE, "--name", "train", "--namespace", "team-a", "train.py")
    assert done.returncode == 1
    assert "you have no right to do this in namespace team-a" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert desk.read("calls").splitlines()[-1].endswith("secret/train service/train")


def test_no_kubectl(desk):
    desk.search = "/nowhere"
    done = desk.run(*IMAGE, "train.py")
    assert done.returncode == 1
    assert "cannot start kubectl: it is not in PATH; install it, or print" in done.stderr
    done = desk.run(*IMAGE, "-o", "json", "train.py")
    assert done.returncode == 0
    kinds = [one["kind"] for one in json.loads(done.stdout)["items"]]
    assert kinds == ["Secret", "JobSet"] and "see --flavour" in done.stderr


def test_dry_run_prints_yaml_and_creates_nothing(desk):
    yaml = pytest.importorskip("yaml", reason="PyYAML is an extra")
    done = desk.run(*IMAGE, "--dry-run", "-n", "2", "-m", "train_GPT.main")
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    assert [one["kind"] for one in objects] == ["Secret", "Service", "Job"]
    assert objects[0]["metadata"]["name"].startswith("train-gpt-")
    assert not (desk.path / "created").exists()


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--on", "kubernetes", "train.py"), "--on kubernetes without --image"),
        ((*IMAGE, "--name", "My_Job", "x.py"), "--name 'My_Job': Kubernetes does not allow it"),
        ((*IMAGE, "--hosts", "a:1", "x.py"), "the pods are the hosts; leave out --hosts"),
        ((*IMAGE, "--sync", "x.py"), "all pods have the image; leave out --sync"),
        ((*IMAGE, "--detach", "x.py"), "the job runs in the cluster anyway"),
        ((*IMAGE, "-o", "toml", "x.py"), "-o 'toml': expected yaml or json"),
        ((*IMAGE, "-n", "2", "-N", "3", "x.py"), "-N 3 with 2 workers"),
        ((*IMAGE, "--flavour", "pod", "x.py"), "--flavour 'pod': expected auto, jobset"),
        ((*IMAGE, "--flavour", "job", "-n", "2", "--pace", "ps", "x.py"), "-s"),
        (("--image", "i", "x.py"), "--image is for --on kubernetes"),
        (("-o", "yaml", "x.py"), "-o is for --on kubernetes"),
        (("--on", "nomad", "x.py"), "--on 'nomad': expected slurm, ray, kubernetes or local"),
        (("--on", "slurm", "--gpus", "1", "x.py"), "--gpus is for --on kubernetes"),
    ],
)
def test_what_does_not_fit_is_refused(words, refusal, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    assert end.value.code == 2
    assert refusal in capsys.readouterr().err
