"""The capture of a backward pass that exchanges gradients is refused. On the test device there are
no graphs, so the stream says here that it is being captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.data_parallel.device_streams import BucketStreams
from paceline.errors import UsageError


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_captured_pass_is_refused(monkeypatch, is_captured):
    stream = SimpleNamespace(is_capturing=lambda: is_captured)
    streams = BucketStreams(torch.device("cuda:3"))
    monkeypatch.setattr(streams, "current", lambda: stream)
    if not is_captured:
        streams.refuse_capture(rank=2)
        return
    with pytest.raises(UsageError, match=r"rank 2: .* captured into a graph of cuda:3.*no_sync"):
        streams.refuse_capture(rank=2)
