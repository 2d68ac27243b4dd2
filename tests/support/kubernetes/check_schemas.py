"""Check objects against the schemas of Kubernetes, JobSet and Kubeflow Trainer.

    .venv-schemas/bin/python check_schemas.py < objects.json

Runs in an environment of its own (.venv-schemas), which has the schemas. Prints one line for each
problem. The models of JobSet and TrainJob accept unknown keys, so what they kept is compared with
what they got. The Jobs inside of a JobSet are checked as Jobs, too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kubernetes_validate
from kubeflow_trainer_api import models

VERSION = "1.33"  # successPolicy of Jobs is stable from here on
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def problems(one: dict[str, Any]) -> list[str]:
    kind = one["kind"]
    if kind not in MODELS:
        return core_problems(one)
    try:
        kept = MODELS[kind].from_dict(one).to_dict()
    except ValueError as error:
        return [f"{kind}: {error}"]
    found = [f"{kind}: unknown {path}" for path in lost(one, kept)]
    spec = one["spec"].get("template", {}).get("spec", {}) if kind != "JobSet" else one["spec"]
    for job in spec.get("replicatedJobs", []):
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        found += core_problems({**body, "spec": job["template"]["spec"]})
    return found


def core_problems(one: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(one, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{one['kind']}: {error}"]
    return []


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Return the paths of values that a model has dropped or changed."""
    if isinstance(given, dict) and isinstance(kept, dict):
        parts = [lost(given[key], kept.get(key), f"{path}.{key}") for key in given]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        parts = [lost(a, b, f"{path}[{index}]") for index, (a, b) in pairs]
    else:
        return [] if given == kept else [f"{path}: {given!r:.80} became {kept!r:.80}"]
    return [one for part in parts for one in part]


if __name__ == "__main__":
    for item in json.load(sys.stdin)["items"]:
        for problem in problems(item):
            print(problem)
