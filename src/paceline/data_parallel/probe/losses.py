"""The loss of a script that reports none: the value on which it calls backward().

Several backward passes of one step (accumulated gradients, several losses) add up, as their
gradients do. A message to the launcher has the mean over the steps since the message before it.
"""

from __future__ import annotations

import torch

from paceline.observe.telemetry.reporter import Reporter


class BackwardLoss:
    """A gauge (observe/telemetry/reporter.py) of the loss. The training thread calls both."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._open: torch.Tensor | None = None  # sum of the current step
        self._step = 0
        self._closed: list[torch.Tensor] = []  # of steps that are not reported yet

    def note(self, loss: torch.Tensor | None) -> None:
        """Add the loss of a backward pass that is about to run."""
        if loss is None:
            return
        self._close()
        self._step = self._reporter.steps_done
        self._open = loss if self._open is None else self._open + loss

    def mean(self) -> float | None:
        """Return the mean over the finished steps since the last call; None without one."""
        self._close()
        if not self._closed:
            return None
        values, self._closed = self._closed, []
        return float(torch.stack(values).mean())

    def _close(self) -> None:
        """Keep the sum of a step that is over."""
        if self._open is not None and self._reporter.steps_done != self._step:
            self._closed.append(self._open)
            self._open = None
