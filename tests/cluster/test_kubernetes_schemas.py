"""Manifests against the schemas of Kubernetes, JobSet and Kubeflow Trainer."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import pytest

from paceline.launcher.engines.kubernetes.manifests import as_json, manifests
from paceline.launcher.engines.kubernetes.request import KubernetesRequest, Volume

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-schemas" / "bin" / "python"
CHECK = ROOT / "tests" / "support" / "kubernetes" / "check_schemas.py"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no schemas: make .venv-schemas/bin/kubernetes-validate"
    ),
]


def problems(objects) -> list[str]:
    done = subprocess.run(
        [PYTHON, CHECK], input=as_json(objects), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def job(flavour: str):
    request = KubernetesRequest(
        **{"name": "train", "image": "i:1", "flavour": flavour, "namespace": "team-a"},
        **{"num_workers": 4, "num_worker_pods": 2, "num_server_pods": 2, "gpus": 1},
        volumes=(Volume.parse("data:/data"),),
        arguments=("-n", "4", "train.py"),
    )
    return manifests(request)


def test_every_flavour_fits_its_schema():
    for flavour in ("jobset", "job", "trainjob"):
        assert problems(job(flavour)) == [], flavour


def test_the_check_sees_unknown_fields_and_wrong_types():
    good = [*job("jobset"), *job("job"), *job("trainjob")]
    for kind, change in {
        "Secret": lambda one: one.update(stringDatum={}),
        "Service": lambda one: one["spec"].update(clusterIP=7),
        "Job": lambda one: one["spec"]["template"]["spec"].update(subDomain="x"),
        "JobSet": lambda one: one["spec"].update(successPolicies={}),
        "TrainingRuntime": lambda one: one["spec"]["mlPolicy"].update(numNodes="2"),
        "TrainJob": lambda one: one["spec"]["trainer"].update(nodes=2),
    }.items():
        objects = copy.deepcopy(good)
        change(next(one for one in objects if one["kind"] == kind))
        found = problems(objects)
        assert len(found) >= 1 and all(kind in line or "numNodes" in line for line in found[:1]), (
            kind,
            found,
        )
    deep = copy.deepcopy(job("jobset"))
    jobs = deep[1]["spec"]["replicatedJobs"]
    jobs[1]["template"]["spec"]["template"]["spec"]["containers"][0]["securitycontext"] = {}
    assert any("securitycontext" in line for line in problems(deep))
