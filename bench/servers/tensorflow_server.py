"""A TensorFlow process that obeys the chief: a worker that computes, or the server of variables.

    python -m servers.tensorflow_server CLUSTER JOB        (started by servers/tensorflow_chief.py)

CLUSTER is JSON (job -> addresses), JOB is worker:0, worker:1 or ps:0.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def quiet_environ() -> None:
    """Set what must be set before TensorFlow is imported."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


def one_thread(tf: Any) -> Any:
    """Return a configuration: one thread computes, as with all contenders; four may wait."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    return tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=4)


def main() -> None:
    cluster, place = sys.argv[1:]
    job, _, index = place.partition(":")
    # The chief may be killed, and no other process knows of this one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    quiet_environ()
    import tensorflow as tf

    server = tf.distribute.Server(
        tf.train.ClusterSpec(json.loads(cluster)),
        job_name=job,
        task_index=int(index),
        protocol="grpc",
        config=one_thread(tf),
    )
    server.join()


if __name__ == "__main__":
    main()
