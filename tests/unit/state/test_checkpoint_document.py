"""docs/checkpoint-format.md says what is on the disk, and commands that work."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest

from paceline import errors
from paceline.cli.main import main
from support.checkpoints import save

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoint-format.md").read_text()


def test_the_manifest_has_the_fields_of_the_page(tmp_path):
    told = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    data = (save(tmp_path, 1) / "manifest.json").read_bytes()
    found = json.loads(data)
    assert list(told) == list(found)
    assert told["parts"][0].keys() == found["parts"][0].keys()
    (record,) = told["parts"][0]["tensors"].values()
    assert record.keys() == found["parts"][0]["tensors"]["model/weight"].keys()
    for field in found:
        assert f"`{field}`" in PAGE
    assert "from byte 14 on" in PAGE
    blanked = data[:14] + b"0" * 64 + data[78:]
    assert hashlib.sha256(blanked).hexdigest() == data[14:78].decode() == found["sha256"]


def test_the_commands_of_the_page_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(Path("runs"), 100)
    commands = re.findall(r"^paceline (checkpoint .*?)\s*(?:#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command))
        assert end.value.code == 0 and capsys.readouterr().out


def test_the_errors_of_the_page_exist():
    named = re.findall(r"^\| `(Checkpoint\w+)` \|", PAGE, re.MULTILINE)
    assert len(named) == 4 and all(hasattr(errors, name) for name in named)
