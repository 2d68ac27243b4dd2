"""The Prometheus endpoint of --metrics-port: how each worker and server is now, over HTTP.

Bound to this machine's loopback address only: there is no password. Labels say who (role and
number) and never which step, so a job of any length has the same few series.

Threads: `update` is called by the recorder; requests are answered by threads of the HTTP server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.observe.record import sampling
from paceline.observe.record.sampling import Sample
from paceline.observe.telemetry.run_state import Who

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_ADDRESS = "127.0.0.1"
_GAUGES = {
    sampling.STEPS_S: ("steps_per_second", "Training steps per second."),
    sampling.SAMPLES_S: ("samples_per_second", "Samples per second."),
    sampling.WAIT: ("wait_share", "Share of the time spent waiting for others."),
    sampling.INPUT: ("input_share", "Share of the time spent waiting for the loader."),
    sampling.COMPUTE: ("compute_share", "Share of the time spent computing."),
    sampling.BYTES_SENT: ("bytes_sent", "Bytes handed to other processes so far."),
    sampling.STALE: ("staleness_mean", "Versions by others that updates had not seen."),
    sampling.RATIO: ("compression_ratio", "Plain bytes for each byte that was sent."),
    sampling.QUEUE: ("server_queue", "Requests that were found waiting."),
    sampling.BUSY: ("server_busy", "Share of the time that went into requests."),
}


class Metrics:
    """An HTTP server for the newest numbers."""

    def __init__(self, port: int) -> None:
        """Take the port (0: any free one), and serve later; ConfigError when that is not possible.

        Serving has to wait because it takes a thread, and the first processes are forked before
        there is any (launcher/processes/process.py).
        """
        try:
            from http.server import ThreadingHTTPServer

            from prometheus_client import MetricsHandler
            from prometheus_client.registry import Collector, CollectorRegistry
        except ImportError as error:
            raise ConfigError(
                "--metrics-port needs the package prometheus-client: pip install prometheus-client,"
                " or leave out --metrics-port"
            ) from error

        class Newest(Collector):
            def collect(_) -> Iterator[GaugeMetricFamily]:
                return self._collect()

        registry = CollectorRegistry()  # of our own: not what else this process may count
        self._mu = threading.Lock()
        self._newest: dict[Who, Sample] = {}  # guarded by: _mu, as the next
        self._heard_s: dict[Who, float] = {}
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
        """Begin to answer."""
        threading.Thread(
            target=self._server.serve_forever, name="paceline-metrics", daemon=True
        ).start()

    def update(self, samples: Iterable[Sample], alive: set[int]) -> None:
        """Show these from now on, and no longer those workers that are not alive."""
        now_s = time.monotonic()
        with self._mu:
            for sample in samples:
                newest = self._newest.setdefault(sample.who, Sample(sample.who, 0))
                newest.step = sample.step
                newest.measured.update(sample.measured)
                newest.reported.update(sample.reported)
                self._heard_s[sample.who] = now_s
            for who in list(self._newest):
                if who[0] == "worker" and who[1] not in alive:
                    del self._newest[who], self._heard_s[who]

    def close(self) -> None:
        """Give the port back."""
        self._server.server_close()

    def _collect(self) -> Iterator[GaugeMetricFamily]:
        with self._mu:
            return iter(list(self._families(time.monotonic())))

    def _families(self, now_s: float) -> Iterator[GaugeMetricFamily]:
        from prometheus_client.core import GaugeMetricFamily

        def family(name: str, words: str, *more: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"paceline_{name}", words, labels=("role", "worker", *more))

        job = self._newest.get(sampling.JOB, Sample(sampling.JOB, 0))
        yield GaugeMetricFamily(
            "paceline_workers", "Workers alive.", value=job.measured.get(sampling.WORKERS, 0)
        )
        others = [sample for who, sample in sorted(self._newest.items()) if who != sampling.JOB]
        step = family("step", "The last training step that was finished.")
        age = family("seconds_since_report", "How long ago it last told anything.")
        reported = family("reported", "What the script reports, by name.", "name")
        for sample in others:
            labels = (sample.who[0], str(sample.who[1]))
            step.add_metric(labels, sample.step)
            age.add_metric(labels, now_s - self._heard_s[sample.who])
            for name, value in sample.reported.items():
                reported.add_metric((*labels, name), value)
        yield from (step, age, reported)
        for tag, (name, words) in _GAUGES.items():
            gauge = family(name, words)
            for sample in others:
                if tag in sample.measured:
                    labels = (sample.who[0], str(sample.who[1]))
                    gauge.add_metric(labels, sample.measured[tag])
            yield gauge
