"""Old names of the public interface work, with a warning that names the new ones."""

from __future__ import annotations

import pytest
import torch

from paceline import extend
from paceline.compress.registry import parse_codec
from paceline.pace.exchange import OwnGradients


def test_old_methods_of_subclasses_run_under_their_new_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"Half\.squeeze was renamed to compress; .* 0\.3"):

        class Half(extend.Codec):
            def squeeze(self, values, payload, draw):
                payload.view(torch.float16).copy_(values)

    codec, values = Half(parse_codec("fp16")), torch.tensor([1.0, -2.5])
    payload = torch.empty(4, dtype=torch.uint8)
    codec.compress(values, payload, None)
    assert payload.view(torch.float16).tolist() == [1.0, -2.5]
    codec.squeeze(values, payload, None)  # the script's own method


def test_old_rounds_of_a_method_are_run() -> None:
    ran = []
    with pytest.warns(DeprecationWarning) as warned:

        class Mine(extend.Method):
            def meet(self) -> None:
                ran.append("exchanged")

            def conclude(self) -> None:
                super().conclude()
                ran.append("applied")

    assert [str(one.message).split(";")[0] for one in warned] == [
        "Mine.meet was renamed to run_round",
        "Mine.conclude was renamed to apply_round",
    ]
    method = object.__new__(Mine)
    method.run_round()
    with pytest.warns(DeprecationWarning, match=r"Method\.conclude was renamed to apply_round"):
        method.apply_round()
    assert ran == ["exchanged", "applied"]


def test_old_calls_reach_new_methods() -> None:
    with pytest.warns(DeprecationWarning, match=r"Exchange\.call_roll was renamed"):
        assert OwnGradients().call_roll(torch.ones(1)).item() == 1.0


@pytest.mark.parametrize(
    ("old", "new"), [("Journey", "CompressedReduction"), ("Ground", "CodecContext")]
)
def test_old_names_of_the_module(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"paceline\.extend\.{old} was renamed to {new}"):
        assert getattr(extend, old) is getattr(extend, new)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = extend.Missing
