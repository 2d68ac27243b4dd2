"""TensorFlow's ParameterServerStrategy with the MLP: starts its processes and gives out the steps.

    python -m servers.tensorflow_chief tensorflow SOCKET BARRIER    (started by harness/training.py)

Two workers compute gradients and apply them (SGD, each variable by itself) to the variables on one
server; this process, the coordinator, only hands out steps. That is TensorFlow's only mode: it is
asynchronous. A turn's steps are handed out at once, so that workers need not wait for this process;
their times are the mean of the turn. The interpreter has TensorFlow, perhaps not torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from servers.tensorflow_server import one_thread, quiet_environ

_NUM_WORKERS = 2
_WIDTHS = (1024, 3072, 3072, 3072, 1024)  # models.mlp
_BATCH, _RATE, _BATCHES = 64, 0.01, 4
_FIRST_PORT = 23400  # in a network of our own, where every port is free


def cluster() -> dict[str, list[str]]:
    addresses = [f"127.0.0.1:{_FIRST_PORT + i}" for i in range(_NUM_WORKERS + 2)]
    return {"worker": addresses[:_NUM_WORKERS], "ps": addresses[-2:-1], "chief": addresses[-1:]}


def start_servers() -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "servers.tensorflow_server", json.dumps(cluster())]
    places = [*(f"worker:{i}" for i in range(_NUM_WORKERS)), "ps:0"]
    return [subprocess.Popen([*command, place]) for place in places]


def cpu_s(processes: list[subprocess.Popen[bytes]]) -> float:
    """Return the CPU time of this process and the given ones."""
    ticks = 0
    for process in processes:
        with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


class Chief:
    """The variables, and the step that workers run."""

    def __init__(self, tf: Any) -> None:
        self._tf = tf
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster()), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        tf.random.set_seed(1)
        with strategy.scope():
            self._layers = [
                self._layer(*widths) for widths in zip(_WIDTHS, _WIDTHS[1:], strict=False)
            ]
        self._step = tf.function(self._train)
        self._batches = iter(self._coordinator.create_per_worker_dataset(self._dataset))

    def _layer(self, before: int, after: int) -> tuple[Any, Any]:
        tf, bound = self._tf, before**-0.5
        weight = tf.random.uniform((before, after), -bound, bound)
        return tf.Variable(weight), tf.Variable(tf.random.uniform((after,), -bound, bound))

    def _dataset(self) -> Any:
        tf = self._tf
        samples = tf.random.normal((_BATCHES, _BATCH, _WIDTHS[0]))
        labels = tf.random.uniform((_BATCHES, _BATCH), 0, _WIDTHS[-1], tf.int64)
        return tf.data.Dataset.from_tensor_slices((samples, labels)).repeat()

    def _train(self, batches: Any) -> Any:
        tf = self._tf
        values, labels = next(batches)
        with tf.GradientTape() as tape:
            for number, (weight, bias) in enumerate(self._layers):
                values = tf.matmul(tf.nn.relu(values) if number else values, weight) + bias
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=values)
            loss = tf.reduce_mean(loss)
        variables = [variable for layer in self._layers for variable in layer]
        for variable, grad in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(_RATE * grad)
        return loss

    def run(self, steps: int) -> tuple[float, float, float]:
        """Let every worker do some steps; return start, end and the last loss."""
        start_s = time.perf_counter()
        for _ in range(steps * _NUM_WORKERS):
            last = self._coordinator.schedule(self._step, args=(self._batches,))
        self._coordinator.join()
        return start_s, time.perf_counter(), float(last.fetch())

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        loss = 0.0
        if request["warmup"]:
            loss = self.run(request["warmup"])[2]
        spans, steps = [], request["steps"]
        if steps:
            start_s, end_s, loss = self.run(steps)
            step_s = (end_s - start_s) / steps
            spans = [(start_s + i * step_s, start_s + (i + 1) * step_s) for i in range(steps)]
        return {"spans": spans, "loss": loss, "checksum": 0.0}


def main() -> None:
    _, socket_path, _ = sys.argv[1:]
    quiet_environ()
    processes = start_servers()
    import tensorflow as tf

    one_thread(tf)
    chief = Chief(tf)
    with socket.socket(socket.AF_UNIX) as controller:
        controller.connect(socket_path)
        lines = controller.makefile("rw", encoding="utf-8")
        _answer(lines, {"version": f"tensorflow {tf.__version__}"})
        parked = time.monotonic(), cpu_s(processes)
        for line in lines:
            used = {
                "parked_s": time.monotonic() - parked[0],
                "parked_cpu_s": cpu_s(processes) - parked[1],
            }
            _answer(lines, {**chief.turn(json.loads(line)), **used})
            parked = time.monotonic(), cpu_s(processes)
    os._exit(0)  # the other processes die with this one


def _answer(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
