"""The streams on which the gradients of a bucket are computed.

Autograd runs each backward operation on the stream of its forward operation, and calls the hook of
a parameter there. As a rule that is one stream. If a model uses several, a bucket has gradients of
all of them: the stream that exchanges it waits for the others first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.comm.devices import stream_reader
from paceline.errors import UsageError


class BucketStreams:
    """The streams of one bucket in one backward pass. Callable from threads of autograd."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.current = stream_reader(device)  # also called by hooks in the core
        self.seen: dict[int, torch.Stream] = {}  # by their id; hooks in the core add to it

    def note(self) -> None:
        """Note that a gradient was launched on the current stream. For each of them: quick."""
        stream = self.current()
        self.seen[stream.stream_id] = stream

    def join(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Let the current stream wait for all gradients, and read those of these parameters."""
        current = self.current()
        others = [stream for number, stream in self.seen.items() if number != current.stream_id]
        self.seen.clear()
        for stream in others:
            current.wait_stream(stream)
        if others:
            for grad in [param.grad for param in params if param.grad is not None]:
                grad.record_stream(current)

    def refuse_capture(self, rank: int) -> None:
        """Raise UsageError if the current stream is being captured into a graph."""
        if self.current().is_capturing():
            raise UsageError(
                f"rank {rank}: a backward pass that exchanges gradients is being captured into a"
                f" graph of {self._device}. A replay would exchange nothing, because the workers"
                " agree on the host after each pass. Capture parts of the model instead"
                " (torch.cuda.make_graphed_callables before distribute), or capture under no_sync()"
            )
