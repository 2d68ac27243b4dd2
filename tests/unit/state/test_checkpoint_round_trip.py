"""What is saved comes back: any tensor, any strides, any JSON; also read by safetensors itself."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.errors import CheckpointCorrupt, CheckpointUnsafe, UnsupportedTensor, UsageError
from paceline.state.files import layout
from paceline.state.files import load as reading
from support.checkpoints import PARTS, bits, save

DTYPES = [name for name in layout.DTYPES if hasattr(torch, name)]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of random bits, with strides as slices, transpositions and expansions make them."""
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = math.prod(shape)
    if dtype is torch.bool:
        flat = torch.randint(0, 2, (count,)).bool()
    else:
        size = torch.empty((), dtype=dtype).element_size()
        flat = torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype)
    tensor = flat.view(shape)
    for change in draw(st.lists(st.sampled_from(["turn", "skip", "expand", "conj"]), max_size=3)):
        if change == "turn":
            tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
        elif change == "skip" and tensor.dim():
            tensor = tensor[::2]
        elif change == "expand" and tensor.dim() < 4:
            tensor = tensor.expand(3, *tensor.shape)
        elif change == "conj" and dtype.is_complex:
            tensor = tensor.conj()
    return tensor


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\\\"é\n"), inner),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(saved=st.lists(tensors(), max_size=5), content=_plain)
def test_odd_tensors_and_any_json_come_back(saved, content):
    given = {f"model/{n}": tensor for n, tensor in enumerate(saved)}
    with TemporaryDirectory() as directory:
        path = save(Path(directory), 3, (given, {}), {"it": content})
        loaded = reading.load(path)
        by_the_library = load_file(path / "part-00000.safetensors")
        assert loaded.content == {"it": content}
        assert loaded.tensors.keys() == by_the_library.keys() == given.keys()
        for name, tensor in given.items():
            for found in (loaded.tensors[name], by_the_library[name]):
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert bits(found) == bits(tensor)


def test_large_tensors_are_written_in_pieces_of_any_strides(tmp_path):
    flat = torch.randn(3 << 20)  # three pieces of 4 MB
    odd = {
        "flat": flat,
        "turned": flat.view(1024, 3072).t(),
        "one long row": flat.view(3, 1 << 20)[:, ::2].unsqueeze(0),
        "expanded": flat[: 1 << 20].expand(2, 1 << 20),
    }
    loaded = reading.load(save(tmp_path, 1, (odd,)))
    assert all(bits(loaded.tensors[name]) == bits(tensor) for name, tensor in odd.items())


def test_only_wanted_parts_are_read(tmp_path):
    path = save(tmp_path, 1)
    other = path / "part-00001.safetensors"
    other.write_bytes(bytes(other.stat().st_size))
    with pytest.raises(CheckpointCorrupt, match="part-00001"):
        reading.load(path)
    assert set(reading.load(path, wanted=lambda name: name == "model/steps").tensors) == {
        "model/steps"
    }


def test_what_cannot_be_saved_is_named(tmp_path):
    cases = {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(1, device="meta"),
        "complex128": torch.zeros(1, dtype=torch.complex128),
    }
    for name, tensor in cases.items():
        with pytest.raises(UnsupportedTensor, match=name):
            save(tmp_path, 1, ({name: tensor},))
    for name in ("../x", "/etc/passwd", "a/../b", "a\nb", "a\\b", "", "x" * 2000, "__metadata__"):
        with pytest.raises(CheckpointUnsafe, match="tensor name"):
            save(tmp_path, 1, ({name: torch.zeros(1)},))
    for content in ({"a": [math.inf]}, {"a": b""}, {1: 2}, {"a": object()}, {"a": "\ud800"}):
        with pytest.raises(UsageError, match="content"):
            save(tmp_path, 1, PARTS, content)


def test_names_of_modules_are_fine(tmp_path):
    names = ["model/0.weight", "model.1/größe", "a[0]/x:y", "model/my layer.(0)", "model/a..b"]
    loaded = reading.load(save(tmp_path, 1, (dict.fromkeys(names, torch.ones(1)),)))
    assert set(loaded.tensors) == set(names)
