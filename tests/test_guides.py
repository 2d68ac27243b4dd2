"""What the guides tell a person to type works: Python runs on real ranks, commands are parsed.

Every block of Python of every page is run, here, but for those that need the launcher itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import takewhile

import pytest
import typer

import paceline
from paceline import errors
from paceline.cli.main import app, main
from paceline.compress.registry import CODECS
from paceline.pace.registry import KNOWN
from support.pages import ROOT, Setup, blocks_of, commands_of, run_script, scripts_of

GUIDES = sorted(
    str(path.relative_to(ROOT))
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
)
SAME = "pl.check_consistency(model)"  # all ranks have the same model at the end
MESH = "docs/guides/model-parallel.md"
# How a script is started, where that is not with two workers; several: it is run several times.
SETUPS: dict[tuple[str, str], list[Setup]] = {
    ("docs/guides/three-lines.md", ""): [Setup(result="digest")],
    ("docs/guides/compression.md", ""): [Setup(result=SAME)],
    ("docs/guides/elastic.md", ""): [Setup(result=SAME)],
    ("docs/guides/paces.md", ""): [
        Setup(env={"PACELINE_PACE": pace}, result="model.agreed().__enter__() or " + SAME)
        for pace in ("local:4", "diloco")  # all others are trained with elsewhere
    ],
    ("docs/guides/parameter-server.md", ""): [Setup(servers=1, result="digest")],
    ("docs/guides/parameter-server.md", "evaluator.py"): [Setup(workers=3, servers=1)],
    ("docs/guides/parameter-server.md", "notebook.py"): [Setup(workers=0)],
    ("docs/guides/neutral-client.md", ""): [Setup(workers=3, servers=1)],
    ("docs/guides/data-workers.md", ""): [Setup(data_workers=(1, 1), result="seen")],
    ("docs/guides/from-ddp.md", "backend.py"): [Setup(like_torchrun=True)],
    ("docs/guides/from-ddp.md", "before train.py"): [Setup(like_torchrun=True)],
    ("docs/guides/from-ddp.md", "after train.py"): [Setup(result=SAME)],
    ("docs/guides/from-horovod.md", "before native.py"): [],  # Horovod is not installed
    ("docs/guides/from-horovod.md", "after native.py"): [Setup(result=SAME)],
    ("docs/guides/ray.md", ""): [],  # Ray is not installed; tests/cluster/test_ray_function.py
    # In another environment: tests/frameworks/test_guide.py runs them there.
    **{
        ("docs/guides/frameworks.md", f"train_{name}.py"): list[Setup]()
        for name in ("keras", "tensorflow", "jax", "lightning", "accelerate", "mxnet")
    },
    ("docs/guides/from-horovod.md", "train_horovod_keras.py"): [],
    ("docs/guides/slow-networks.md", ""): [Setup(result="digest")],
    (MESH, ""): [
        Setup(env={"PACELINE_MESH": mesh}, without=left_out, result="float(loss)")
        for mesh, left_out in (
            ("tp=2", 'torch.device("meta")'),  # the blocks that each cannot run, the other does
            ("pp=2", "loss_of(model(x), y).backward()"),
        )
    ],
}
RUNS = [
    pytest.param(page, title, setup, id=f"{page[5:]} {title} {number or ''}".strip())
    for page in GUIDES
    for title in scripts_of(page)
    for number, setup in enumerate(SETUPS.get((page, title), [Setup()]))
]
OPTIONS_OF_OTHERS = {
    *("--output-filename", "--timeline-filename", "--host-discovery-script"),  # horovodrun's
    *("--verbose", "--check-build"),
    "--no-kill",
    "--working-dir",
    "--nproc-per-node",
    "--standalone",
    "--quick",
    "--min-np",
    "--max-np",
}
KNOWN_PROGRAMS = {
    "python",
    "torchrun",
    "mpirun",
    "ray",
    "salloc",
    "srun",
    "pip",
    "export",
    "curl",
    "tensorboard",
}


@pytest.mark.parametrize(("page", "title", "setup"), RUNS)
def test_python_runs(page: str, title: str, setup: Setup) -> None:
    results = run_script(scripts_of(page, setup.without)[title], setup)
    assert len({repr(value) for value, _ in results}) == 1, "ranks disagree"
    if page == MESH and setup.env["PACELINE_MESH"] == "tp=2":
        table = next(b.text for b in blocks_of(page) if b.text.startswith("tensor parallel, tp=2"))
        printed = results[0][1].splitlines()
        assert all(line in printed for line in table.splitlines() if line)


def test_every_setup_has_its_script_and_what_is_not_run_is_python_at_least() -> None:
    for (page, title), setups in SETUPS.items():
        script = scripts_of(page)[title]
        if not setups:
            compile(script, page, "exec")


def test_every_block_has_a_language() -> None:
    known = {"python", "sh", "console", "text", "diff", "json", "yaml"}
    for page in GUIDES:
        if page.startswith("docs/guides/"):
            assert {block.language for block in blocks_of(page)} <= known, page


def understand(words: list[str]) -> None:
    """Let the command line read what stands behind `paceline`, without doing it."""
    command = typer.main.get_command(app)
    context = command.make_context("paceline", list(words))
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def words_of(page: str) -> list[list[str]]:
    """The commands of a page; of a loop of the shell the first one."""
    return [[*takewhile(lambda word: word != ";", words)] for words in commands_of(page)]


def check(words: list[str]) -> None:
    """What a command names exists: a verb and its options, a script, a target of make."""
    while words and re.fullmatch(r"[A-Z_]+=.*|sudo|until", words[0]):
        words = words[1:]
    program, *rest = words or ["export"]
    if program == "paceline" and rest[0] == "run":
        with pytest.raises(SystemExit) as end:
            main(["run", "--dry-run", *rest[1:]])
        assert end.value.code == 0
    elif program == "paceline":
        understand(rest)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "python" and rest[0].startswith(("bench/", "examples/")):
        assert (ROOT / rest[0]).exists()
    else:
        assert program in KNOWN_PROGRAMS, program


@pytest.mark.parametrize("page", GUIDES)
def test_commands_are_understood(page, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for words in words_of(page):
        check(words)


def test_the_neutral_clients_evaluator_sees_the_loss_go_down() -> None:
    page = "docs/guides/neutral-client.md"
    *_, (_, output) = run_script(scripts_of(page)[""], SETUPS[page, ""][0])
    losses = re.findall(r"^version (\d+): loss ([\d.]+)", output, re.MULTILINE)
    assert losses[-1][0] == "40" and float(losses[-1][1]) < 0.1, output


@pytest.mark.parametrize("pace", ["", "local:2"])
def test_a_precision_on_the_command_line_wins(pace: str) -> None:
    script = scripts_of("docs/guides/mixed-precision.md")[""] + PROBE
    env = {"PACELINE_PRECISION": "bf16", "PACELINE_PACE": pace} if pace else {}
    results = run_script(script, Setup(env=env, result="digest"))
    assert len({value for value, _ in results}) == 1
    dtype = "torch.bfloat16" if pace else "torch.float16"
    assert all(f"{dtype}\n" in output for _, output in results)


PROBE = """
model[0].register_forward_hook(lambda module, inputs, output: print(output.dtype))
model(data[0][0][None])
with model.agreed():
    digest = pl.check_consistency(model)
"""


def guide(name: str) -> str:
    return (ROOT / "docs" / "guides" / f"{name}.md").read_text()


def test_the_paces_guide_has_every_pace_and_the_compression_guide_every_codec() -> None:
    text = guide("paces")
    assert all(f"`{name}" in text for name in KNOWN)
    text = guide("compression")
    for name in CODECS.keys() - {"auto", "none"}:
        assert re.search(rf"`{name}[`:(]", text), name


def test_the_guides_name_only_verbs_and_options_that_exist() -> None:
    verbs = typer.main.get_command(app).commands
    known = {name for verb in verbs.values() for p in verb.params for name in p.opts}
    for page in [page for page in GUIDES if page.startswith("docs/guides/")]:
        text = (ROOT / page).read_text()
        assert set(re.findall(r"`paceline ([a-z]+)", text)) <= verbs.keys(), page
        told = set(re.findall(r"`(--[a-z][a-z-]+)", text)) - OPTIONS_OF_OTHERS
        assert told <= known, f"{page}: {told - known}"


def test_the_first_guide_shows_the_lines_that_the_example_changes() -> None:
    (shown,) = [b.text for b in blocks_of("docs/guides/three-lines.md") if b.language == "diff"]
    changed = [line[1:].strip() for line in shown.splitlines() if line.startswith("+")]
    example = (ROOT / "examples" / "digits" / "after.py").read_text().splitlines()
    assert len(changed) == 4 and set(changed) <= {line.strip() for line in example}


def test_the_guide_to_failures_has_every_error() -> None:
    text = guide("failures")
    tree = [name for name, thing in vars(errors).items() if isinstance(thing, type)]
    assert len(tree) > 25 and not [name for name in tree if f"`{name}" not in text]


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    for package in (paceline, paceline.ps):
        for name, home in package._HOME.items():
            assert {f"{home}.{name}", home} & documented, name
    homes = {f"{home}.{name}": name for name, home in paceline._HOME.items()}
    elsewhere = {name for path, name in homes.items() if path in documented}
    for name in paceline.extend.__all__:
        is_told = f"paceline.extend.{name}" in documented or name in elsewhere
        assert is_told or f"`{name}`" in pages, name


def test_the_site_is_built_without_warnings_and_fetches_nothing(tmp_path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 60
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//")
    assert not [page for page in pages if fetched.search(page.read_text())]
