"""The Prometheus endpoint of --metrics-port: current values of each worker and server, over HTTP.

It listens on the loopback address only, because it has no password. Labels hold role and number and
never the step, so a job of any length has the same few series.

Threads: the recorder calls `update`; threads of the HTTP server answer requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.observe.record import sampling
from paceline.observe.record.sampling import Sample
from paceline.observe.telemetry.run_state import ProcessKey

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_ADDRESS = "127.0.0.1"
_GAUGES = {
    sampling.STEPS_S: ("steps_per_second", "Training steps per second."),
    sampling.SAMPLES_S: ("samples_per_second", "Samples per second."),
    sampling.WAIT: ("wait_share", "Share of the time spent waiting for other processes."),
    sampling.INPUT: ("input_share", "Share of the time spent waiting for the loader."),
    sampling.COMPUTE: ("compute_share", "Share of the time spent computing."),
    sampling.BYTES_SENT: ("bytes_sent", "Bytes sent to other processes so far."),
    sampling.STALE: ("staleness_mean", "Mean number of versions that updates had not seen."),
    sampling.RATIO: ("compression_ratio", "Uncompressed bytes per byte sent."),
    sampling.QUEUE: ("server_queue", "Requests waiting in the queue."),
    sampling.BUSY: ("server_busy", "Share of the time spent on requests."),
}


class Metrics:
    """An HTTP server for the newest samples."""

    def __init__(self, port: int) -> None:
        """Bind the port (0: any free one); raise ConfigError if that fails.

        `start` begins to serve. It needs a thread, and the first processes must be forked before
        there is one (launcher/processes/process.py).
        """
        try:
            from http.server import ThreadingHTTPServer

            from prometheus_client import MetricsHandler
            from prometheus_client.registry import Collector, CollectorRegistry
        except ImportError as error:
            raise ConfigError(
                "--metrics-port needs the package prometheus-client; run pip install"
                " prometheus-client, or leave out --metrics-port"
            ) from error

        class Newest(Collector):
            def collect(_) -> Iterator[GaugeMetricFamily]:
                return self._collect()

        registry = CollectorRegistry()  # only these metrics, not others of this process
        self._mu = threading.Lock()
        self._newest: dict[ProcessKey, Sample] = {}  # guarded by: _mu
        self._updated_s: dict[ProcessKey, float] = {}  # guarded by: _mu
        registry.register(Newest())
        try:
            handler = MetricsHandler.factory(registry)
            self._server = ThreadingHTTPServer((_ADDRESS, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--metrics-port {port}: {reason}; choose another port, or 0 for any free one"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{_ADDRESS}:{self._server.server_address[1]}/metrics"

    def start(self) -> None:
        """Start to serve."""
        threading.Thread(
            target=self._server.serve_forever, name="paceline-metrics", daemon=True
        ).start()

    def update(self, samples: Iterable[Sample], alive: set[int]) -> None:
        """Serve these samples from now on, and drop workers that are not alive."""
        now_s = time.monotonic()
        with self._mu:
            for sample in samples:
                newest = self._newest.setdefault(sample.key, Sample(sample.key, 0))
                newest.step = sample.step
                newest.measured.update(sample.measured)
                newest.reported.update(sample.reported)
                self._updated_s[sample.key] = now_s
            for key in list(self._newest):
                if key[0] == "worker" and key[1] not in alive:
                    del self._newest[key], self._updated_s[key]

    def close(self) -> None:
        """Close the port."""
        self._server.server_close()

    def _collect(self) -> Iterator[GaugeMetricFamily]:
        with self._mu:
            return iter(list(self._families(time.monotonic())))

    def _families(self, now_s: float) -> Iterator[GaugeMetricFamily]:
        from prometheus_client.core import GaugeMetricFamily

        def family(name: str, help_text: str, *more: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(
                f"paceline_{name}", help_text, labels=("role", "worker", *more)
            )

        job = self._newest.get(sampling.JOB, Sample(sampling.JOB, 0))
        yield GaugeMetricFamily(
            "paceline_workers", "Workers alive.", value=job.measured.get(sampling.WORKERS, 0)
        )
        processes = [sample for key, sample in sorted(self._newest.items()) if key != sampling.JOB]
        step = family("step", "The last finished training step.")
        age = family("seconds_since_report", "Seconds since its last report.")
        reported = family("reported", "Values reported by the script, by name.", "name")
        for sample in processes:
            labels = (sample.key[0], str(sample.key[1]))
            step.add_metric(labels, sample.step)
            age.add_metric(labels, now_s - self._updated_s[sample.key])
            for name, value in sample.reported.items():
                reported.add_metric((*labels, name), value)
        yield from (step, age, reported)
        for tag, (name, help_text) in _GAUGES.items():
            gauge = family(name, help_text)
            for sample in processes:
                if tag in sample.measured:
                    labels = (sample.key[0], str(sample.key[1]))
                    gauge.add_metric(labels, sample.measured[tag])
            yield gauge
