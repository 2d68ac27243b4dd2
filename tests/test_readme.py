"""What the README and the guides tell a person to type works: Python runs, commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.compress.known import CODECS
from paceline.pace.known import KNOWN, paces_with_servers
from paceline.pace.parse import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guides" / "three-lines.md").read_text()
SERVER_GUIDE = (ROOT / "docs" / "guides" / "parameter-server.md").read_text()
PACES_GUIDE = (ROOT / "docs" / "guides" / "paces.md").read_text()
ELASTIC_GUIDE = (ROOT / "docs" / "guides" / "elastic.md").read_text()
COMPRESSION_GUIDE = (ROOT / "docs" / "guides" / "compression.md").read_text()
PRECISION_GUIDE = (ROOT / "docs" / "guides" / "mixed-precision.md").read_text()
MESH_GUIDE = (ROOT / "docs" / "guides" / "model-parallel.md").read_text()
CLIENT_GUIDE = (ROOT / "docs" / "guides" / "neutral-client.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^(paceline [a-z].*?)\s*(?:#.*)?$", README, re.MULTILINE)
VERBS = re.findall(r"^make (\w+)", README, re.MULTILINE)


def paceline(*arguments: str, cwd: Path) -> str:
    out = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_python_of_the_readme_runs_on_two_ranks(block, tmp_path):
    (tmp_path / "script.py").write_text(BLOCKS[block] + '\nprint("reached the end")\n')
    out = paceline("run", "-n", "2", "script.py", cwd=tmp_path)
    assert out.count("reached the end") == 2


def test_python_of_the_guide_is_one_script_that_runs_on_two_ranks(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "script.py").write_text("".join(blocks) + '\nprint("the end is", digest)\n')
    out = paceline("run", "-n", "2", "script.py", cwd=tmp_path)
    ends = re.findall(r"the end is (\w+)", out)
    assert len(ends) == 2 and ends[0] == ends[1]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [([], "float16"), (["--pace", "local:2", "--precision", "bf16"], "bfloat16")],
    ids=["as it is", "another precision"],
)
def test_python_of_the_precision_guide_is_one_script(options, dtype, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PRECISION_GUIDE, re.DOTALL)
    assert len(blocks) == 2
    end = """
model[0].register_forward_hook(lambda module, inputs, output: print(output.dtype))
model(data[0][0][None])
with model.agreed():
    print("the end is", pl.check_consistency(model))
"""
    (tmp_path / "script.py").write_text("".join(blocks) + end)
    out = paceline("run", "-n", "2", *options, "script.py", cwd=tmp_path)
    ends = re.findall(r"the end is (\w+)", out)
    assert len(ends) == 2 and ends[0] == ends[1]
    assert out.count(f"torch.{dtype}\n") == 2


def test_commands_of_the_precision_guide_are_understood(tmp_path):
    (tmp_path / "train.py").touch()
    commands = re.findall(r"^paceline (run .*?)\s*(?:#.*)?$", PRECISION_GUIDE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        first, *rest = shlex.split(command)
        assert "16" in paceline(first, "--dry-run", *rest, cwd=tmp_path)


def test_python_of_the_clients_guide_is_one_script_that_runs_with_a_server(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", CLIENT_GUIDE, re.DOTALL)
    (tmp_path / "script.py").write_text("".join(blocks))
    out = paceline("run", "-n", "3", "-s", "1", "script.py", cwd=tmp_path)
    losses = re.findall(r"\[2\] version (\d+): loss ([\d.]+)", out)
    assert losses[-1][0] == "40" and float(losses[-1][1]) < 0.1, out


@pytest.mark.parametrize(
    "pace",
    [
        pytest.param("ps", marks=pytest.mark.slow),
        "async",
        pytest.param("ssp:3", marks=pytest.mark.slow),
    ],
)
def test_python_of_the_server_guide_is_one_script_at_every_pace(pace, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", SERVER_GUIDE, re.DOTALL)
    script = "".join(block for block in blocks if "pl.launch(" not in block)
    (tmp_path / "script.py").write_text(script + '\nprint("the end is", digest)\n')
    out = paceline("run", "-n", "2", "-s", "1", "--pace", pace, "script.py", cwd=tmp_path)
    ends = re.findall(r"the end is (\w+)", out)
    assert len(ends) == 2 and ends[0] == ends[1]


def test_the_server_guides_notebook_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", SERVER_GUIDE, re.DOTALL)
    (script,) = [block for block in blocks if "pl.launch(" in block]
    (tmp_path / "script.py").write_text(script + "\nprint(len(results))\n")
    out = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert out.stdout == "2\n", out.stdout + out.stderr


def test_the_server_guide_has_every_option_of_the_server_paces():
    table = SERVER_GUIDE.partition("## Options")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    told = {
        (pace, name)
        for name, _, paces in rows
        for pace in (paces_with_servers() if paces == "all" else re.findall(r"`(\w+)`", paces))
    }
    assert told == {(pace, name) for pace in paces_with_servers() for name in KNOWN[pace].options}


def test_python_of_the_elastic_guide_is_one_script_that_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", ELASTIC_GUIDE, re.DOTALL)
    (tmp_path / "script.py").write_text("".join(blocks) + "\nprint(pl.check_consistency(model))\n")
    out = paceline("run", "-n", "2", "--min", "1", "script.py", cwd=tmp_path)
    ends = re.findall(r"^\[\d\] (\w{16})$", out, re.MULTILINE)
    assert len(ends) == 2 and ends[0] == ends[1], out
    assert (tmp_path / "model.pt").exists()


def test_python_of_the_paces_guide_is_one_script_at_every_pace_without_servers(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", PACES_GUIDE, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    paces = [name for name, row in KNOWN.items() if row.method and not row.needs_servers]
    assert all(f"`{name}" in PACES_GUIDE for name in KNOWN), "every pace is in the guide"
    for pace in ["local:4", "diloco"]:  # all others are trained with elsewhere
        assert parse(pace).name in paces
        out = paceline("run", "-n", "2", "--pace", pace, "train.py", cwd=tmp_path)
        ends = re.findall(r"agreed: (.*)", out)
        assert len(ends) == 2 and ends[0] == ends[1], out


def test_the_paces_guide_has_every_option_of_its_paces():
    own = [row for row in KNOWN.values() if row.method]
    common = {"buffers", "bucket_mb", "batchnorm", "unused", "resize_lr"}  # in the first guide
    for row in own:
        for option in row.options.keys() - common:
            assert f"`{option}" in PACES_GUIDE, option


@pytest.mark.parametrize(
    ("mesh", "left_out"),
    [
        ("tp=2", 'torch.device("meta")'),
        pytest.param("pp=2", "loss_of(model(x), y).backward()", marks=pytest.mark.slow),
        pytest.param("fsdp=2", None, marks=pytest.mark.slow),
    ],
)
def test_python_of_the_mesh_guide_is_one_script(mesh, left_out, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", MESH_GUIDE, re.DOTALL)
    kept = [block for block in blocks if left_out is None or left_out not in block]
    assert len(kept) == len(blocks) - (left_out is not None)
    (tmp_path / "train.py").write_text("".join(kept) + "\nprint('the end is', float(loss))\n")
    out = paceline("run", "--mesh", mesh, "train.py", cwd=tmp_path)
    ends = re.findall(r"the end is ([\d.]+)", out)
    assert len(ends) == 2 and ends[0] == ends[1], out
    assert (tmp_path / "model.pt").exists()
    (table,) = re.findall(r"```\n(tensor parallel, tp=2\n.*?)```", MESH_GUIDE, re.DOTALL)
    printed = re.sub(r"^\[0\] ", "", out, flags=re.MULTILINE)
    assert all(line in printed.splitlines() for line in table.splitlines() if line)


def test_commands_of_the_mesh_guide_are_understood(tmp_path):
    (tmp_path / "train.py").touch()
    commands = re.findall(r"^paceline (run .*?)\s*(?:#.*)?$", MESH_GUIDE, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        first, *rest = shlex.split(command)
        assert "mesh: " in paceline(first, "--dry-run", *rest, cwd=tmp_path)


def test_python_of_the_compression_guide_is_one_script_that_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", COMPRESSION_GUIDE, re.DOTALL)
    (tmp_path / "train.py").write_text("".join(blocks) + "\nprint(pl.check_consistency(model))\n")
    out = paceline("run", "-n", "2", "train.py", cwd=tmp_path)
    ends = re.findall(r"^\[\d\] (\w{16})$", out, re.MULTILINE)
    assert len(ends) == 2 and ends[0] == ends[1], out
    told = re.findall(r'^paceline run -n 4 --pace "(.*?)" train', COMPRESSION_GUIDE, re.MULTILINE)
    assert len(told) >= 3
    for command in told:
        assert paceline("run", "--dry-run", "-n", "4", "--pace", command, "train.py", cwd=tmp_path)


def test_the_compression_guide_has_every_codec_and_option():
    for name, row in CODECS.items():
        assert name in ("auto", "none") or re.search(rf"`{name}[`:(]", COMPRESSION_GUIDE), name
        for option in row.options:
            assert re.search(rf"[`(]{option}[`=]", COMPRESSION_GUIDE), option


def test_commands_of_the_elastic_guide_are_understood(tmp_path):
    (tmp_path / "train.py").touch()
    for command in re.findall(r"^paceline run (.*?)\s*(?:#.*)?$", ELASTIC_GUIDE, re.MULTILINE):
        assert paceline("run", "--dry-run", *command.split(), cwd=tmp_path)
    verbs = re.findall(r"^\| `paceline (\w+)", ELASTIC_GUIDE, re.MULTILINE)
    assert len(verbs) >= 6
    for verb in verbs:
        assert paceline(verb, "--help", cwd=tmp_path)


def test_the_elastic_guide_has_every_option(tmp_path):
    told = set(re.findall(r"^\| `(--[a-z-]+)", ELASTIC_GUIDE, re.MULTILINE))
    known = paceline("run", "--help", cwd=tmp_path)
    assert len(told) == 7 and all(option in known for option in told)


def test_the_guide_shows_the_lines_that_the_example_changes():
    shown = re.search(r"```diff\n(.*?)```", GUIDE, re.DOTALL)
    assert shown
    changed = [line[1:].strip() for line in shown[1].splitlines() if line.startswith("+")]
    example = (ROOT / "examples" / "digits" / "after.py").read_text().splitlines()
    assert len(changed) == 4 and set(changed) <= {line.strip() for line in example}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme_are_understood(command, tmp_path):
    (tmp_path / "train.py").write_text("import sys; print('trained', sys.argv[1:])")
    out = paceline(*command.split()[1:], cwd=tmp_path)
    assert out


def test_make_has_the_verbs_of_the_readme():
    makefile = (ROOT / "Makefile").read_text()
    assert VERBS
    for verb in VERBS:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"make {verb} does not exist"
