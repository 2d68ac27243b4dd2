"""The streams on which the gradients of a bucket are computed.

Autograd runs each backward operation on the stream of its forward operation, and calls the hook of
a parameter there. As a rule that is one stream. If a model uses several, a bucket has gradients of
all of them: the stream that exchanges it waits for the others first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.errors import UsageError


class BucketStreams:
    """The streams of one bucket in one backward pass. Callable from threads of autograd."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[int, torch.Stream] = {}  # by their id

    def note(self) -> None:
        """Note that a gradient was launched on the current stream."""
        stream = torch.accelerator.current_stream(self._device)
        self._seen[stream.stream_id] = stream

    def join(self, grads: Iterable[torch.Tensor]) -> None:
        """Let the current stream wait for all gradients, and read these, of other streams."""
        current = torch.accelerator.current_stream(self._device)
        others = [stream for number, stream in self._seen.items() if number != current.stream_id]
        self._seen.clear()
        for stream in others:
            current.wait_stream(stream)
        if others:
            for grad in grads:
                grad.record_stream(current)

    def refuse_capture(self, rank: int) -> None:
        """Raise UsageError if the current stream is being captured into a graph."""
        if torch.accelerator.current_stream(self._device).is_capturing():
            raise UsageError(
                f"rank {rank}: a backward pass that exchanges gradients is being captured into a"
                f" graph of {self._device}. A replay would exchange nothing, because the workers"
                " agree on the host after each pass. Capture parts of the model instead"
                " (torch.cuda.make_graphed_callables before distribute), or capture under no_sync()"
            )
