"""`paceline checkpoint`: what people see, the exit codes, and files that others can load."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.main import main
from support.checkpoints import PARTS, save


@pytest.fixture
def paceline(capsys):
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["checkpoint", *map(str, words)])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


def flip(path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_ls_has_a_row_for_each_and_says_what_is_damaged(tmp_path, paceline):
    for step in (9, 100):
        save(tmp_path, step)
    flip(tmp_path / "step-000000009" / "manifest.json")
    code, out, _ = paceline("ls", tmp_path)
    rows = out.splitlines()
    assert code == 0 and len(rows) == 4
    assert rows[0].split() == ["step", "size", "saved", "workers", "pace", "name", "state"]
    assert rows[1].split()[0] == "100" and "2  allreduce" in rows[1] and "complete" in rows[1]
    assert rows[2].split()[0] == "9" and rows[2].endswith("CheckpointCorrupt")
    assert "step-000000009/manifest.json is damaged: expected sha256" in rows[3]


def test_ls_of_nothing(tmp_path, paceline):
    assert paceline("ls", tmp_path) == (0, f"no checkpoints in {tmp_path}\n", "")
    code, _, err = paceline("ls", tmp_path / "no")
    assert code == 1 and "no such directory" in err
    torch.save({}, tmp_path / "model.pt")
    code, _, err = paceline("ls", tmp_path / "model.pt")
    assert code == 1 and "CheckpointUnsafe: refusing pickle" in err


def test_show_prints_content_and_tensors_without_control_characters(tmp_path, paceline):
    content = {"pace": "ssp:3\x1b[31m\x9b", "long": list(range(100)), "text": "x" * 1000}
    path = save(tmp_path, 100, PARTS, content)
    for given in (path, tmp_path):
        code, out, _ = paceline("show", given)
        assert code == 0 and "\x1b" not in out and "\x9b" not in out
        assert "step 100" in out and "by 2 workers" in out
        assert '"... 100 items"' in out and "1000 characters" in out
        assert "model/weight  float32  2x3" in out
        assert "model/steps" in out and "scalar" in out and "part-00001" in out


def test_verify_says_which_file_and_which_hashes(tmp_path, paceline):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert paceline("verify", tmp_path)[:2] == (
        0,
        "step-000000003: valid, 2 parts, 3 tensors, 357 B\n",
    )
    flip(tmp_path / "step-000000002" / "part-00001.safetensors")
    assert paceline("verify", tmp_path)[0] == 0, "only the newest one"
    assert paceline("verify", tmp_path / "step-000000003")[0] == 0
    for words in ((tmp_path, "--all"), (tmp_path / "step-000000002",)):
        code, out, _ = paceline("verify", *words)
        assert code == 1
        assert "step-000000002: CheckpointCorrupt:" in out
        assert "part-00001.safetensors is damaged: expected sha256" in out and ", found " in out
    (tmp_path / "empty").mkdir()
    code, _, err = paceline("verify", tmp_path / "empty")
    assert code == 1 and "no checkpoint" in err


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_export_writes_a_plain_state_dict(suffix, tmp_path, paceline):
    more = {"model.1/bias": torch.ones(2, dtype=torch.bfloat16), "model.10/x": torch.ones(1)}
    path = save(tmp_path / "runs", 100, (*PARTS, more))
    target = tmp_path / f"model{suffix}"
    code, out, _ = paceline("export", path, "-o", target)
    assert code == 0 and "2 tensors of step 100" in out
    state = torch.load(target, weights_only=True) if suffix == ".pt" else load_file(target)
    assert state.keys() == {"weight", "steps"}
    assert torch.equal(state["weight"], PARTS[0]["model/weight"])
    assert target.stat().st_size < 3000, "only these tensors, not the parts that they are in"

    code, _, err = paceline("export", path, "-o", target)
    assert code == 2 and "--force" in err
    assert paceline("export", path, "-o", target, "--force", "--model", 1)[0] == 0
    state = torch.load(target, weights_only=True) if suffix == ".pt" else load_file(target)
    assert state.keys() == {"bias"}
    assert {each.name for each in tmp_path.iterdir()} == {"runs", target.name}


def test_export_refuses(tmp_path, paceline):
    path = save(tmp_path / "runs", 100)
    code, _, err = paceline("export", path, "-o", tmp_path / "model.bin")
    assert code == 2 and ".safetensors or .pt" in err
    code, _, err = paceline("export", path, "-o", tmp_path / "m.pt", "--model", 3)
    assert code == 1 and "begin with model.3/" in err
    for suffix in ("pt", "safetensors"):
        code, _, err = paceline("export", path, "-o", tmp_path / "no" / f"m.{suffix}")
        assert code == 1 and "CheckpointError: cannot write" in err
    flip(path / "part-00000.safetensors")
    code, _, err = paceline("export", path, "-o", tmp_path / "m.pt")
    assert code == 1 and "CheckpointCorrupt" in err
    assert {each.name for each in tmp_path.iterdir()} == {"runs"}


def test_all_but_export_do_without_torch(tmp_path):
    save(tmp_path, 100)
    code = f"""
import sys
from paceline.cli.main import _exit_code
for words in (["ls"], ["show"], ["verify", "--all"]):
    assert _exit_code(["checkpoint", *words, {str(tmp_path)!r}]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
