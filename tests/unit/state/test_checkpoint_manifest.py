"""The manifest: any one that somebody has sealed correctly is loaded, or refused as one of ours."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointCorrupt, CheckpointError
from paceline.state.files import load as reading
from paceline.state.files import manifest
from support.checkpoints import save

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1 << 31, 1 << 62, 1 << 64, 10**30, 0.5, "", "..", "/", "float32", "x"]),
    st.lists(st.integers(-2, 1 << 62), max_size=4),
    st.just({}),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a document: the dict or list, and the key in it."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += nodes(value[key])
    return found


def seal(told: dict[str, Any]) -> bytes:
    told = {"sha256": "0" * 64, **{key: told[key] for key in told if key != "sha256"}}
    data = msgspec.json.encode(told)
    data = msgspec.json.format(data, indent=1) + b"\n"
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)


@pytest.fixture(scope="module")
def saved():
    with TemporaryDirectory() as directory:
        yield save(Path(directory), 1)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_sealed_manifest_is_loaded_or_refused(saved, data):
    file = saved / "manifest.json"
    whole = file.read_bytes()
    told = json.loads(whole)
    for _ in range(data.draw(st.integers(1, 2))):
        inside, key = data.draw(st.sampled_from(nodes(told)))
        if data.draw(st.booleans()):
            inside[key] = data.draw(ODD)
        else:
            del inside[key]
        if not nodes(told):
            break
    try:
        file.write_bytes(seal(told))
        reading.load(saved)
    except CheckpointError as error:
        assert str(saved) in str(error)
    finally:
        file.write_bytes(whole)


def test_a_sealed_manifest_is_the_one_that_was_written(saved):
    whole = (saved / "manifest.json").read_bytes()
    assert seal(json.loads(whole)) == whole
    described = manifest.decode(whole, saved)
    assert manifest.encode(described) == whole
    assert described.content == {"pace": "allreduce", "step": 1}


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with pytest.raises(CheckpointError):
        manifest.decode(data, Path("there"))


def test_large_numbers_come_back(tmp_path):
    """As the state of numpy's generators has them."""
    content = {"state": secrets.randbits(128) | 1 << 127, "small": 5e-324, "list": [[], [{}]]}
    path = save(tmp_path, 1, content=copy.deepcopy(content))
    assert reading.load(path).content == content


def test_a_manifest_of_another_json_writer_is_not_ours(saved):
    """The hash is over bytes: the same document with other spaces is another file."""
    told = json.loads((saved / "manifest.json").read_bytes())
    with pytest.raises(CheckpointCorrupt, match="begin with its hash"):
        manifest.decode(json.dumps(told).encode(), saved)
