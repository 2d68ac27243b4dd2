"""Whatever happens to the files of a checkpoint is noticed, and said with the file's name.

Every single byte, every length, and what a stranger could put there instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from paceline.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointUnsafe,
    CheckpointUnsupported,
)
from paceline.state.files import layout, manifest
from paceline.state.files import load as reading
from paceline.state.files import save as writing
from support.checkpoints import PARTS, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2; tests do things to the second."""
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


@pytest.fixture
def path(root: Path) -> Path:
    return root / "step-000000002"


def refusal_of(path: Path) -> CheckpointError:
    """Every way to read it refuses it, for the same reason."""
    with pytest.raises(CheckpointError) as refused:
        reading.load(path)
    with pytest.raises(type(refused.value)):
        reading.verify(path)
    return refused.value


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    """Change a manifest as somebody would who knows how its hash is made."""
    file = path / "manifest.json"
    told = json.loads(file.read_bytes())
    change(told)
    told["sha256"] = "0" * 64
    data = msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n"
    digest = hashlib.sha256(data).hexdigest().encode()
    file.write_bytes(data.replace(b"0" * 64, digest, 1))


def replace_part(path: Path, data: bytes, number: int = 0) -> None:
    """Put other bytes in the place of a part, with a manifest that says that they are right."""
    (path / f"part-{number:05d}.safetensors").write_bytes(data)

    def change(told: dict) -> None:
        told["parts"][number]["bytes"] = len(data)
        told["parts"][number]["sha256"] = hashlib.sha256(data).hexdigest()

    rewrite(path, change)


def test_a_flip_in_every_byte_of_every_file_is_noticed(path):
    flips = 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in range(len(whole)):
            for mask in (1 << at % 8, 0x20):  # 0x20: the case of letters
                damaged = bytearray(whole)
                damaged[at] ^= mask
                file.write_bytes(damaged)
                with pytest.raises(CheckpointError) as refused:
                    reading.verify(path)
                assert refused.value.path == str(file) and str(file) in str(refused.value)
                flips += 1
        file.write_bytes(whole)
    assert reading.verify(path).step == 2
    sizes = [file.stat().st_size for file in path.iterdir()]
    assert flips == 2 * sum(sizes) > 2000


def test_a_flipped_byte_names_both_hashes(path):
    file = path / "part-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"?")
    expected, found = (hashlib.sha256(data).hexdigest() for data in (whole, file.read_bytes()))
    error = refusal_of(path)
    assert type(error) is CheckpointCorrupt
    assert str(error) == f"{file} is damaged: expected sha256 {expected}, found {found}"


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_every_shorter_and_longer_length_is_noticed(name, path):
    whole = (path / name).read_bytes()
    for length in range(len(whole)):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointCorrupt, match=name):
            reading.verify(path)
    (path / name).write_bytes(whole + b"\0")
    assert name in str(refusal_of(path))


def test_files_that_are_missing_added_or_in_each_others_place(path):
    def refused(change: Callable[[], object], *words: str) -> None:
        copy = Path(shutil.copytree(path, path.with_name("kept")))
        change()
        error = refusal_of(path)
        assert type(error) is CheckpointCorrupt
        assert all(word in str(error) for word in words), error
        shutil.rmtree(path)
        copy.rename(path)

    first, second = path / "part-00000.safetensors", path / "part-00001.safetensors"
    refused(second.unlink, "part-00001.safetensors", "missing", "sha256")
    refused((path / "manifest.json").unlink, "manifest.json", "missing")
    refused(lambda: shutil.copy(first, path / "part-00002.safetensors"), "part-00002.safetensors")
    refused(lambda: (path / "notes.txt").touch(), "notes.txt")
    refused(lambda: shutil.copy(first, second), "part-00001.safetensors")
    refused(lambda: (second.rename(path / "x"), first.rename(second)), "x, which its manifest")
    other = path.with_name("step-000000001") / "manifest.json"
    refused(lambda: shutil.copy(other, path / "manifest.json"), "is of step 1")


def test_equal_sizes_in_each_others_place(tmp_path):
    parts = ({"a": torch.zeros(4)}, {"b": torch.ones(4)})
    path = save(tmp_path, 1, parts)
    first, second = path / "part-00000.safetensors", path / "part-00001.safetensors"
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1]), second.write_bytes(data[0])
    assert "part-00000.safetensors is damaged: expected sha256" in str(refusal_of(path))


def test_nothing_there(tmp_path):
    assert reading.newest(tmp_path / "no") == reading.NewestCheckpoint(None, ())
    assert reading.newest(tmp_path) == reading.NewestCheckpoint(None, ())
    with pytest.raises(CheckpointError, match="No such file"):
        reading.load(tmp_path / "step-000000001")
    (tmp_path / "step-000000001").mkdir()
    with pytest.raises(CheckpointCorrupt, match="not a checkpoint"):
        reading.load(tmp_path / "step-000000001")
    (tmp_path / "file").touch()
    for call in (reading.load, reading.list_checkpoints, reading.newest):
        with pytest.raises(CheckpointError, match="Not a directory"):
            call(tmp_path / "file")


def test_an_older_one_is_taken_and_said_or_not_taken(root, path):
    (path / "part-00001.safetensors").unlink()
    found = reading.newest(root)
    assert found.loaded is not None and found.loaded.step == 1
    (notice,) = found.notices
    assert "step-000000002/part-00001.safetensors is damaged" in notice
    assert notice.endswith("fell back to " + str(root / "step-000000001"))
    with pytest.raises(CheckpointCorrupt, match="part-00001"):
        reading.newest(root, "stop")
    (root / "step-000000001" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointCorrupt, match="none of the 2 checkpoints") as refused:
        reading.newest(root)
    assert "step-000000001" in str(refused.value) and "step-000000002" in str(refused.value)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_pickles_are_refused_by_name_and_not_run(name, is_zip, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    file = path / name
    torch.save({"x": Bomb()}, file, _use_new_zipfile_serialization=is_zip)
    error = refusal_of(path)
    assert type(error) is CheckpointUnsafe
    assert str(error).startswith(f"refusing pickle: {file} ")
    if name != "manifest.json":
        replace_part(path, file.read_bytes())  # also when the manifest agrees
        assert isinstance(refusal_of(path), CheckpointError)
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "name",
    ["../step-000000001/part-00000.safetensors", "/etc/passwd", "part-0.safetensors", "", "a\0b"],
)
def test_names_of_files_that_lead_away(name, path):
    rewrite(path, lambda told: told["parts"][0].update(file=name))
    error = refusal_of(path)
    assert type(error) is CheckpointUnsafe and repr(name) in str(error)


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../x", "a\nb", "\x1b[31m", "__metadata__"])
def test_names_of_tensors_that_lead_away(name, path):
    def change(told: dict) -> None:
        tensors = told["parts"][0]["tensors"]
        tensors[name] = tensors.pop("model/weight")

    rewrite(path, change)
    error = refusal_of(path)
    assert type(error) is CheckpointUnsafe and repr(name) in str(error)


def test_links_are_not_followed(root, path):
    for name in ("part-00000.safetensors", "manifest.json"):
        file, away = path / name, root / f"away-{name}"
        file.rename(away)
        file.symlink_to(away)
        error = refusal_of(path)
        assert type(error) is CheckpointUnsafe and f"{file} is a symbolic link" in str(error)
        file.unlink()
        away.rename(file)
    link = root / "step-000000003"
    link.symlink_to(path)
    assert type(refusal_of(link)) is CheckpointUnsafe
    found = reading.newest(root)
    assert found.loaded is not None and found.loaded.path == path


def test_things_that_are_no_files(path):
    file = path / "part-00000.safetensors"
    file.unlink()
    os.mkfifo(file)  # opening it must not wait for a writer
    assert type(refusal_of(path)) is CheckpointUnsafe
    file.unlink()
    file.mkdir()
    assert type(refusal_of(path)) is CheckpointUnsafe


def crafted(path: Path, entries: dict[str, object], length: int | None = None) -> None:
    """A part of the right size and hash with another header."""
    right = layout.header(reading.inspect(path).parts[0].tensors)
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(len(right) - 8)
    assert len(text) == len(right) - 8
    head = struct.pack("<Q", len(text) if length is None else length) + text
    body = (path / "part-00000.safetensors").read_bytes()[len(right) :]
    replace_part(path, head + body)


GOOD = {
    "model/steps": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
    "model/weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
}


def test_headers_as_a_stranger_would_write_them(path):
    crafted(path, GOOD)
    assert reading.verify(path), "so far it is the right one"
    for change in (
        {"data_offsets": [0, 24]},  # overlaps
        {"data_offsets": [-8, 16]},
        {"data_offsets": [8, 1 << 40]},
        {"data_offsets": [32, 8]},
        {"shape": [1 << 40, 1 << 40]},
        {"dtype": "F64"},
    ):
        crafted(path, {**GOOD, "model/weight": {**GOOD["model/weight"], **change}})
        error = refusal_of(path)
        assert type(error) is CheckpointCorrupt and "header" in str(error), change
    crafted(path, GOOD, length=10 << 30)
    assert "header" in str(refusal_of(path))
    crafted(path, {"model/weight": GOOD["model/weight"]})
    assert "header" in str(refusal_of(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [1 << 40, 1 << 40]}, "overflows"),
        ({"shape": [1 << 61, 1 << 61, 1 << 61]}, "overflows"),
        ({"shape": [0, 1 << 61]}, "overflows"),
        ({"shape": [1] * 100 + [6]}, "101 dimensions"),
        ({"shape": [-2, -3]}, ">= 0"),
        ({"shape": [2.5]}, "int"),
        ({"shape": [1 << 70]}, "no manifest"),
        ({"shape": [10**9]}, "need"),
        ({"dtype": "object"}, "unknown dtype"),
        ({"more": 1}, "more"),
    ],
)
def test_tensors_that_cannot_be(change, words, path):
    rewrite(path, lambda told: told["parts"][0]["tensors"]["model/weight"].update(change))
    error = refusal_of(path)
    assert type(error) is CheckpointCorrupt and words in str(error)


def test_tensors_that_would_not_be_aligned(tmp_path):
    """A part in another order, with everything else right."""
    path = save(tmp_path, 1, ({"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2)},))
    records = dict(reversed(reading.inspect(path).parts[0].tensors.items()))

    def change(told: dict) -> None:
        told["parts"][0]["tensors"] = msgspec.to_builtins(records)

    replace_part(path, layout.header(records) + bytes(11))
    rewrite(path, change)
    assert "part-00000.safetensors are not in order" in str(refusal_of(path))


def test_sizes_that_lie_allocate_nothing(path):
    """A manifest whose numbers agree with each other still has to agree with the file's size."""

    def change(told: dict) -> None:
        told["parts"][0]["tensors"]["model/weight"]["shape"] = [1 << 40]
        records = {
            name: layout.TensorRecord(entry["dtype"], tuple(entry["shape"]))
            for name, entry in told["parts"][0]["tensors"].items()
        }
        told["parts"][0]["bytes"] = layout.size_bytes(records)

    rewrite(path, change)
    assert "bytes, found 224" in str(refusal_of(path))


def test_manifests_that_cannot_be(path):
    cases: list[tuple[Callable[[dict], object], type[CheckpointError], str]] = [
        (lambda told: told.update(format=5), CheckpointUnsupported, "newer format 5 > 1"),
        (lambda told: told.update(format=0), CheckpointCorrupt, "format 0"),
        (lambda told: told.update(world=0), CheckpointCorrupt, "world"),
        (lambda told: told.update(step=-1), CheckpointCorrupt, "step"),
        (lambda told: told.update(step="2"), CheckpointCorrupt, "step"),
        (lambda told: told.pop("parts"), CheckpointCorrupt, "parts"),
        (lambda told: told.update(extra=1), CheckpointCorrupt, "extra"),
        (lambda told: told["parts"].append(told["parts"][0]), CheckpointCorrupt, "twice"),
        (lambda told: told["parts"][0].update(sha256="X" * 64), CheckpointCorrupt, "sha256"),
        (lambda told: told["parts"][0].update(bytes=-1), CheckpointCorrupt, "bytes"),
    ]
    whole = (path / "manifest.json").read_bytes()
    for change, kind, words in cases:
        rewrite(path, change)
        error = refusal_of(path)
        assert type(error) is kind and words in str(error), error
        (path / "manifest.json").write_bytes(whole)


def test_a_newer_format_with_other_rules(path):
    """Of which only the number is known: it says to update, not that it is damaged."""
    (path / "manifest.json").write_bytes(b'{"format": 7, "signature": "..."}')
    error = refusal_of(path)
    assert type(error) is CheckpointUnsupported and "newer format 7 > 1" in str(error)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"[" * 100_000, b'{"sha256": 1}', b"\xff\xfe", b"null", b"PK"]
)
def test_manifests_of_something_else(data, path):
    (path / "manifest.json").write_bytes(data)
    assert type(refusal_of(path)) is CheckpointCorrupt


def test_deep_content_with_the_right_hash(path):
    blank = b'{\n "sha256": "' + b"0" * 64 + b'",\n "content": ' + b"[" * 100_000
    digest = hashlib.sha256(blank).hexdigest().encode()
    (path / "manifest.json").write_bytes(blank.replace(b"0" * 64, digest, 1))
    assert type(refusal_of(path)) is CheckpointCorrupt


def test_one_tensor_in_two_parts_is_not_published(tmp_path):
    staging = writing.begin(tmp_path, 1, "nonce")
    parts = [writing.write_part(staging, number, PARTS[0]) for number in (0, 1)]
    with pytest.raises(CheckpointCorrupt, match="in two parts"):
        writing.publish(staging, manifest.make(step=1, world=2, content={}, parts=parts))
