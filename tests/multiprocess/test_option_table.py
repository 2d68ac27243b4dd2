"""One declaration of an option is enough: a test adds one, and finds it wherever it belongs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACE = '    """The options that servers receive: each field is also a field of their Rule."""\n'
DECLARATION = """
    patience: Annotated[int, At(("async",), WHOLE, "how patient the servers are")] = 7
"""
# Lets every process of a job find the edited file under the name of the one in the package.
SITE = """
import importlib.util, sys

class Edited:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "paceline.options.table":
            return importlib.util.spec_from_file_location(name, {path!r})

sys.meta_path.insert(0, Edited)
"""
SCRIPT = """
import paceline as pl, torch
from paceline.data_parallel.distribute import distributed
from paceline.ps.spec import rule_of
from paceline.ps.spec import Rule
from ps_tables import remote_table

pl.init()
model = torch.nn.Linear(2, 2)
pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
[(_, switcher)] = distributed()
print("rule:", rule_of("async", 0, switcher.training.options).patience, flush=True)
try:
    remote_table("refused by the server", 4, Rule(bound=None, patience=-1))
except pl.errors.UsageError as error:
    print(error, flush=True)
"""
DOCS = """
import sys
sys.path.insert(0, {docs!r})
import option_tables
print(option_tables.fill("<!-- options: async -->\\n<!-- end -->\\n"))
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory) -> dict[str, str]:
    """The environment of a Paceline with one option more."""
    place = tmp_path_factory.mktemp("edited")
    source = (ROOT / "src/paceline/options/table.py").read_text()
    assert source.count(PLACE) == 1
    (place / "edited.py").write_text(source.replace(PLACE, PLACE + DECLARATION))
    (place / "sitecustomize.py").write_text(SITE.format(path=str(place / "edited.py")))
    (place / "train.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(place), str(ROOT / "tests/fault")])
    return {**os.environ, "PYTHONPATH": paths, "PACELINE_LOG_DIR": "none"}


def run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def paceline(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return run(environ, "-m", "paceline", *words)


def test_it_reaches_the_servers_which_check_it(environ) -> None:
    script = str(Path(environ["PYTHONPATH"].split(os.pathsep)[0]) / "train.py")
    done = paceline(environ, "run", "-n1", "-s1", "--pace", "async[patience=9]", script)
    assert done.returncode == 0, done.stderr
    assert "rule: 9" in done.stdout
    refusal = "table 'refused by the server': patience=-1 must be a whole number above 0"
    assert refusal in done.stdout


@pytest.mark.parametrize(
    ("pace", "refusal"),
    [
        ("async[patience=0]", "patience='0': expected a whole number above 0, such as patience=1"),
        ("async[patients=3]", "no option 'patients' (did you mean patience?)"),
        ("ssp[patience=3]", "ssp has no option 'patience'"),
    ],
)
def test_it_is_refused_on_the_command_line(environ, pace: str, refusal: str) -> None:
    done = paceline(environ, "run", "--dry-run", "-s1", "--pace", pace, "train.py")
    assert done.returncode == 2 and refusal in done.stderr, done.stderr


def test_it_is_in_the_lists_and_in_the_tables_of_the_guides(environ) -> None:
    listed = paceline(environ, "paces", "async").stdout
    assert "patience=<a whole number above 0>  (default: 7)\n      how patient the" in listed
    assert "patience" not in paceline(environ, "paces", "ssp").stdout
    table = run(environ, "-c", DOCS.format(docs=str(ROOT / "docs"))).stdout
    assert "| `patience` | 7 | how patient the servers are |" in table
