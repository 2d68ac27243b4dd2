"""iperf3 as a contender: how long the link would take for so many bytes, one way and both ways."""

from __future__ import annotations

import json
import shutil
import subprocess

from harness.namespaces import Cable
from harness.ranks import ContenderFailed
from harness.rounds import Plan, Runner

_SECONDS = 1


class Iperf:
    """A server at end 0 that sleeps between measurements; clients at end 1."""

    def __init__(self, cable: Cable) -> None:
        self._cable = cable
        command = ["iperf3", "--server", "--bind", cable.addresses[0]]
        self._server = subprocess.Popen(
            [*cable.enter(0), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        shown = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, check=False)
        self.version = shown.stdout.split()[1] if shown.stdout else "?"

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("iperf3") is not None

    def runners(self) -> list[Runner]:
        def one_way(plan: Plan, _: int) -> list[float]:
            end = self._measure()
            return [plan.num_bytes * 8 / end["sum_received"]["bits_per_second"]]

        def both_ways(plan: Plan, _: int) -> list[float]:
            end = self._measure("--bidir")
            slower = min(
                end[name]["bits_per_second"]
                for name in ("sum_received", "sum_received_bidir_reverse")
            )
            return [plan.num_bytes * 8 / slower]

        return [
            Runner("iperf3 one way", one_way, self.version),
            Runner("iperf3 both ways", both_ways, self.version),
        ]

    def _measure(self, *options: str) -> dict[str, dict[str, float]]:
        client = ["iperf3", "--json", "--time", str(_SECONDS), "--client"]
        command = [*self._cable.enter(1), *client, self._cable.addresses[0], *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answer = json.loads(done.stdout or "{}")
        if "end" not in answer or "sum_received" not in answer["end"]:
            raise ContenderFailed(f"iperf3: {answer.get('error', done.stderr.strip())}")
        return answer["end"]  # type: ignore[no-any-return]

    def stop(self) -> None:
        self._server.terminate()
        self._server.wait()
