"""Kubernetes: each pod is a host.

    request.py       what is asked for, and every name that Kubernetes would refuse
    pod_template.py  one pod: security, files, probes
    manifests.py     a JobSet, an Indexed Job, or a Kubeflow TrainJob of such pods
    kubectl.py       creates them, and explains kubectl's errors
    pods.py          inside the cluster: the pods of the job, from the environment
    engine.py        the engine: gets agents onto pods
    pod.py           what runs in a pod of workers or servers: waits for the launcher, runs an agent
    agent_relay.py   the messages between the two, and both ends of an agent's stdin and stderr
    heartbeat.py     a file that shows that a pod's program is alive; probe.py: kubelet's look at it

    pod coordinator    paceline run ...     the launcher, which dials every other pod by its name
    pods worker, server    pod.py           authenticates the launcher with the mounted secret

A pod that dies is a lost host. Its replacement has the same name, and the launcher dials it again.
"""
