"""Manifests: three flavours of the same pods, each pod shut in, each failure costing one pod."""

from __future__ import annotations

import json
import re

import pytest

from paceline.control.transport.auth import load_secret
from paceline.errors import AuthError, ConfigError
from paceline.launcher.engines.kubernetes.kubectl import explain_kubectl
from paceline.launcher.engines.kubernetes.manifests import as_json, as_yaml, manifests
from paceline.launcher.engines.kubernetes.pods import PODS, kubernetes_hosts, pods_text
from paceline.launcher.engines.kubernetes.request import KubernetesRequest, Volume, allowed_name
from paceline.launcher.hosts.host_list import HostSlots

DIGITS = "ab" * 32
FLAVOURS = ("jobset", "job", "trainjob")


def request(**changes) -> KubernetesRequest:
    values = {
        "name": "train",
        "image": "registry.example.org/train:1",
        "num_workers": 3,
        "num_worker_pods": 2,
        "num_server_pods": 1,
        "arguments": ("-n", "3", "train.py", "$(HOME)", "$X"),
    }
    return KubernetesRequest(**{**values, **changes})


def job_specs(objects) -> dict[str, dict]:
    """Return the specs of all Jobs by role."""
    found = {}
    for one in objects:
        if one["kind"] == "Job":
            found["any"] = one["spec"]
        spec = one["spec"]["template"]["spec"] if one["kind"] == "TrainingRuntime" else one
        spec = one["spec"] if one["kind"] == "JobSet" else spec
        for job in spec.get("replicatedJobs", []):
            found[job["name"]] = job["template"]["spec"]
    return found


def objects_of(flavour: str, **changes):
    return manifests(request(flavour=flavour, **changes), DIGITS)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_pods_are_shut_in(flavour):
    specs = job_specs([o for o in objects_of(flavour) if "spec" in o])
    for role, job in specs.items():
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == role
        inside = pod["securityContext"]
        assert inside["runAsNonRoot"] and inside["runAsUser"] > 0
        assert inside["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["secret"]["secret"]["defaultMode"] == 0o400
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert paths["/dev/shm"] == "shm" and paths["/tmp"] == "scratch"
        assert container["livenessProbe"]["exec"]["command"][-1].endswith("kubernetes.probe")
        assert pod["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_secret_is_in_the_secret_alone(flavour):
    objects = objects_of(flavour)
    assert [o["kind"] for o in objects if DIGITS in json.dumps(o)] == ["Secret"]
    assert "Secret" not in [o["kind"] for o in objects_of(flavour, secret="mine")]
    volumes = [
        volume["secret"]["secretName"]
        for job in job_specs(
            [o for o in objects_of(flavour, secret="mine") if "spec" in o]
        ).values()
        for volume in job["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert set(volumes) == {"mine"}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_one_lost_pod_recreates_no_other(flavour):
    objects = [o for o in objects_of(flavour, retries=5) if "spec" in o]
    for role, job in job_specs(objects).items():
        assert job["backoffLimitPerIndex"] == 5 and job["completionMode"] == "Indexed"
        ignored, saved, final = job["podFailurePolicy"]["rules"]
        assert ignored["action"] == "Ignore"
        assert ignored["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert saved["onExitCodes"]["values"] == [75] and saved["action"] == "Ignore"
        assert final["action"] == "FailJob"
        decides = role in ("coordinator", "any")
        assert final["onExitCodes"]["operator"] == ("NotIn" if decides else "In")
        assert final["onExitCodes"]["values"] == ([75, 137, 143] if decides else [2])


def test_the_coordinator_decides():
    (jobset,) = [o for o in objects_of("jobset") if o["kind"] == "JobSet"]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["coordinator"]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}
    service, job = objects_of("job")[1:]
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    pod = job["spec"]["template"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    runtime, trainjob = objects_of("trainjob")[1:]
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    steps = {
        job["name"]: job["template"].get("metadata", {}).get("labels", {})
        for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]
    }
    assert steps["node"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert steps["coordinator"] == steps["server"] == {}


@pytest.mark.parametrize(
    ("flavour", "workers", "servers"),
    [
        ("jobset", "train-worker-0-{}.train", ["train-server-0-0.train"]),
        ("job", "train-{}.train", ["train-3.train"]),
        ("trainjob", "train-node-0-{}.train", ["train-server-0-0.train"]),
    ],
)
def test_names_of_pods(flavour, workers, servers):
    asked = request(flavour=flavour)
    first = 1 if flavour == "job" else 0
    assert asked.worker_pods() == [workers.format(first), workers.format(first + 1)]
    assert asked.server_pods() == servers
    hosts = kubernetes_hosts({PODS: pods_text(asked.hosts())})
    assert hosts == asked.hosts()
    assert [(host.slots, host.server_slots) for host in hosts] == [(2, 0), (2, 0), (0, 1)]
    alone = request(flavour=flavour, num_server_pods=0).hosts()  # servers may be anywhere
    assert [(host.slots, host.server_slots) for host in alone] == [(2, None), (2, None)]


def test_words_of_the_user_are_not_expanded():
    job = job_specs(objects_of("jobset")[1:])["coordinator"]
    command = job["template"]["spec"]["containers"][0]["command"]
    assert command[-3:] == ["train.py", "$$(HOME)", "$$X"]


def test_resources_and_volumes():
    asked = {"cpus": "4", "memory": "8Gi", "gpus": 2, "volumes": (Volume.parse("data:/data"),)}
    specs = job_specs(objects_of("jobset", **asked)[1:])
    limits = {
        role: job["template"]["spec"]["containers"][0]["resources"]["limits"]
        for role, job in specs.items()
    }
    assert limits["worker"] == {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"}
    assert limits["server"] == {"cpu": "4", "memory": "8Gi"}
    for job in specs.values():
        pod = job["template"]["spec"]
        assert {"name": "claim-0", "mountPath": "/data"} in pod["containers"][0]["volumeMounts"]
        assert pod["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "data"}


def test_yaml_and_json_are_the_same():
    yaml = pytest.importorskip("yaml", reason="PyYAML is an extra")
    objects = objects_of("trainjob")
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects
    assert json.loads(as_json(objects))["items"] == objects


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Train_1"}, "--name 'Train_1': Kubernetes does not allow .* --name train-1"),
        ({"name": "1st"}, "for example --name job-1st"),
        ({"name": "a" * 41}, "at most 40"),
        ({"name": "train-"}, "--name train$"),
        ({"namespace": "Team A"}, "--namespace 'Team A': expected lower-case"),
        ({"image": "my image"}, "--image 'my image': expected an image"),
        ({"image": ""}, "--image '': expected"),
        ({"secret": "S"}, "--secret 'S'"),
        ({"flavour": "pytorchjob"}, "expected auto, jobset, job or trainjob"),
        ({"num_worker_pods": 4}, "-N 4 with 3 workers"),
        ({"cpus": "4 cores"}, "--cpus '4 cores': expected a quantity, such as 4 or 500m"),
        ({"memory": "8GB"}, "--memory '8GB': expected a quantity, such as 8Gi"),
        ({"gpus": -1}, "--gpus -1"),
        ({"retries": -1}, "--retries -1"),
        ({"volumes": (Volume("a", "/x"), Volume("b", "/x"))}, "the same path"),
    ],
)
def test_what_kubernetes_would_refuse(changes, words):
    with pytest.raises(ConfigError, match=words):
        request(**changes)


@pytest.mark.parametrize("text", ["data", "data:", "data:relative", "Data:/x", ":/x", "data:/"])
def test_volumes_that_are_refused(text):
    with pytest.raises(ConfigError, match="expected the name of a PersistentVolumeClaim"):
        Volume.parse(text)
    with pytest.raises(ConfigError, match="a volume of their own at /tmp/x"):
        Volume.parse("data:/tmp/x")


@pytest.mark.parametrize("text", ["a", "a:1,", "a:99999", "a b:1", "A:1"])
def test_a_list_of_pods_that_nobody_wrote(text):
    with pytest.raises(ConfigError, match="PACELINE_PODS"):
        kubernetes_hosts({PODS: text})
    assert kubernetes_hosts({}) == ()
    assert kubernetes_hosts({PODS: "a.b:0"}) == (HostSlots("a.b", 0, server_slots=1),)


def test_names_that_are_near():
    assert allowed_name("train_GPT.v2") == "train-gpt-v2"
    assert allowed_name("") == "job" and allowed_name("__") == "job"
    assert len(allowed_name("x" * 90)) == 40


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (
            'Error from server (Forbidden): error when creating "STDIN": secrets is forbidden: User'
            ' "eve" cannot create resource "secrets" in API group "" in the namespace "team-a"',
            'you have no right to do this in namespace team-a; .* [(]kubectl: .*User "eve" cannot',
        ),
        (
            'error: unable to recognize "STDIN": no matches for kind "JobSet" in version "x"',
            "JobSet is not installed in this cluster; use --flavour job",
        ),
        (
            'Error from server (NotFound): namespaces "team-a" not found',
            "namespace team-a does not exist; create it",
        ),
        ('Error from server (AlreadyExists): jobs "train" already exists', "choose another --name"),
        (
            "error: You must be logged in to the server (Unauthorized)",
            "Kubernetes does not know you; log in",
        ),
        ("error: something new", "Kubernetes does not accept the job: something new"),
        ("", "no reason given"),
    ],
)
def test_kubectls_errors_in_words(errors, words):
    assert re.search(words, explain_kubectl(errors, "team-a"))


def test_a_mounted_secret_may_be_readable_for_the_group_only(tmp_path):
    """kubelet adds the group's right to mode 0400; any other secret file must be private."""
    path = tmp_path / "secret"
    path.write_text(DIGITS)
    path.chmod(0o440)
    assert load_secret(path, is_mounted=True) == bytes.fromhex(DIGITS)
    with pytest.raises(AuthError, match="mode 0440"):
        load_secret(path)
    path.chmod(0o444)
    with pytest.raises(AuthError, match="mode 0444"):
        load_secret(path, is_mounted=True)
