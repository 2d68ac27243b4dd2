"""The shape of the project, as tests: layers, public names, lazy imports, and the README's tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paceline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
PUBLIC = {
    *("init", "shutdown", "rank", "world_size", "local_rank", "world", "new_group", "empty"),
    *(
        "is_data_worker",
        "data_rank",
        "data_world_size",
        "report",
        "should_stop",
        "carry",
        "distribute",
        "shard",
        "steps",
        "epochs",
        "check_consistency",
        "data_warmup",
        "device",
        "Checkpoint",
        "GradScaler",
        "GradualWarmup",
        "Trainer",
        "Callback",
        "Group",
        "Work",
        "Membership",
    ),
    *(
        "PacelineError",
        "errors",
        "extend",
        "ps",
        "ray",
        "launch",
        "measure_layers",
        "tensor_plan",
        "clip_grad_norm_",
    ),
}


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def python_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_public_names_are_pinned():
    assert set(paceline.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(paceline, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize(
    "statement",
    [
        "import paceline",
        "import paceline.cli.main, paceline.launcher.job",
        "import paceline.control.client.rendezvous, paceline.runtime.config",
    ],
)
def test_the_command_line_and_control_plane_need_no_torch(statement):
    loaded = modules_after(statement)
    assert "torch" not in loaded
    assert "paceline._core" not in loaded


def test_importing_paceline_does_not_import_the_launcher():
    loaded = modules_after("import paceline; paceline.init")
    assert not {name for name in loaded if name.startswith(("paceline.launcher", "paceline.cli"))}


def test_layers_point_downwards():
    linter = Path(sys.executable).with_name("lint-imports")
    out = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


def test_only_config_reads_the_environment():
    readers = {
        str(path.relative_to(SOURCE))
        for path in python_files()
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    }
    assert readers == {"runtime/config.py"}


FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell():
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            assert not FORBIDDEN_MODULES & set(names), f"{path} imports {names}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in FORBIDDEN_CALLS and called != "torch.load", f"{path}: {called}"
                assert not any(k.arg == "shell" for k in node.keywords), f"{path}: shell="


# What a pace is shows in its ExchangeTraits and in the hooks of Method and Update.
POLYMORPHIC = {"Exchange", "Method", "Update"}


def test_no_other_folder_asks_which_exchange_method_or_update_it_has():
    trees = {path: ast.parse(path.read_text()) for path in python_files()}
    classes = [
        (node.name, {ast.unparse(base).split(".")[-1] for base in node.bases}, path.parent)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    family = set(POLYMORPHIC)
    while more := {name for name, bases, _ in classes if bases & family} - family:
        family |= more
    assert {"AllReduce", "ServerExchange", "OuterSteps", "ServedUpdate"} <= family
    folders = {name: folder for name, _, folder in classes if name in family}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            asked: ast.expr | None = None
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                asked = node.args[1]
            elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
                asked = node.comparators[0]
            names = {n.id for n in ast.walk(asked) if isinstance(n, ast.Name)} if asked else set()
            strangers = {name for name in names & family if folders[name] != path.parent}
            assert not strangers, (
                f"{path}:{node.lineno} asks for {strangers}: add a trait or method"
            )


# Everything else that a person reads goes through paceline/runtime/console.py.
MAY_NAME_STDERR = {
    "runtime/console.py": "the one place that writes there",
    "observe/display/display.py": "asks whether it is a terminal; the display thread owns it",
    "launcher/function/forked.py": "flushes it before a fork and before os._exit",
    "launcher/processes/script_end.py": "flushes it before os._exit, and prints SystemExit's text",
    "cli/main.py": "the last words of a command, which no application redirects",
    "ray.py": "shows what the launcher prints, also in a notebook",
}
MAY_WRITE_TO_DESCRIPTOR_2 = {"cli/detach.py": "the error of a supervisor, in its log"}
MAY_PRINT = {
    "cli/horovodrun.py": "the answer to --check-build",
    "cli/main.py": "the last words of a command",
    "cli/selftest.py": "the output of a program of its own",
}


def test_one_function_prints_to_a_person():
    names_stderr, writes, prints = set(), set(), set()
    for path in python_files():
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "sys.stderr",
                "sys.__stderr__",
            ):
                names_stderr.add(name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                prints.add(name)
            if isinstance(node, ast.Call) and ast.unparse(node).startswith("os.write(2,"):
                writes.add(name)
    assert names_stderr == set(MAY_NAME_STDERR)
    assert writes == set(MAY_WRITE_TO_DESCRIPTOR_2)
    assert prints == set(MAY_PRINT)


def test_errors_are_drawn_as_they_are():
    errors = (SOURCE / "errors.py").read_text()
    classes = {node.name for node in ast.walk(ast.parse(errors)) if isinstance(node, ast.ClassDef)}
    drawn = set(re.findall(r"^\s*(?:[|\s-]*)\b([A-Z]\w+)\b", errors.split('"""')[1], re.MULTILINE))
    assert classes <= drawn


def tree_in_readme() -> set[str]:
    """Paths named in the README's annotated tree, relative to the root."""
    block = re.search(r"```text\npaceline/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "the README has no tree"
    paths, parents = set(), [""]
    for line in block[1].splitlines():
        match = re.match(r"^([│ ]*)[├└]── (\S+)", line)
        if not match:
            continue
        depth = len(match[1]) // 4
        parents[depth + 1 :] = [f"{parents[depth]}{match[2]}"]
        paths.add(parents[depth + 1])
    return paths


def test_the_readmes_tree_is_true():
    tree = tree_in_readme()
    missing = {path for path in tree if not (ROOT / path).exists()}
    assert not missing
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    top = {name.split("/")[0] for name in tracked if not name.startswith(".git")}
    named = {path.split("/")[0] for path in tree}
    top = {name for name in top if not name.startswith(".")}  # settings of tools
    assert top <= named, f"not in the README's tree: {top - named}"
    packages = {f"src/paceline/{p.name}/" for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    assert packages <= tree


def test_no_module_hides_a_public_name():
    # Python puts a submodule that was imported over an attribute of that name: pl.report ...
    modules = {path.stem for path in (ROOT / "src/paceline").iterdir()}
    both = modules & set(paceline.__all__)
    assert both == {name for name in both if isinstance(getattr(paceline, name), ModuleType)}
