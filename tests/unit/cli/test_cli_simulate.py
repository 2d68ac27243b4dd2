"""`paceline simulate`: a table, a CSV file, a plot, and errors that say what to type."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from paceline.cli.main import main


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"parameters_bytes": 4e7, "compute_s": 0.1, "batch": 8}))
    return str(path)


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_same_seed_gives_the_same_table(model, capsys):
    words = ["--workers", "16", "--link", "1gbit,50us", "--servers", "4", "--straggler", "3x2%"]
    words += ["--mtbf", "6h", "--steps", "20", model]
    code, first, _ = run(capsys, *words)
    assert code == 0 and "16 workers on 16 hosts, link 1gbit,50us" in first
    assert run(capsys, *words)[1] == first
    rows = {line.split("  ")[0]: line for line in first.splitlines()[3:]}
    assert set(rows) == {
        *("allreduce", "ps, 4 servers", "ssp:3, 4 servers", "async, 4 servers"),
        *("local:8", "diloco:50"),
    }
    assert next(iter(rows)) == "diloco:50"  # the fastest first, on a link of 1 Gbit/s


def test_a_long_simulation_says_how_long_it_takes(model, capsys):
    words = ["--workers", "600", "--steps", "1000", "--paces", "async", model]
    code, _, error = run(capsys, *words)
    assert code == 0 and "simulating 600,000 steps of single workers (ssp, async): about" in error
    code, _, error = run(capsys, "--workers", "600", "--steps", "1000", "--paces", "ps", model)
    assert code == 0 and not error


def test_a_sweep_writes_csv_and_a_plot(model, capsys, tmp_path):
    table, plot = tmp_path / "sweep.csv", tmp_path / "sweep.svg"
    words = ["--paces", "allreduce,local:8[compress=int8,bucket_mb=8]", "--steps", "5"]
    words += ["--sweep", "workers=2,8,32", "--sweep", "per-host=1,2"]
    code, out, _ = run(capsys, *words, "-o", str(table), "--plot", str(plot), model)
    assert code == 0 and f"wrote {table}" in out
    assert len(table.read_text().splitlines()) == 1 + 3 * 2 * 2
    drawn = ElementTree.fromstring(plot.read_text())
    groups = [one for one in drawn.iter() if one.get("stroke-width") == "2"]
    lines = [one for group in groups for one in group]
    assert len(lines) == 4 and all(len(one.get("points").split()) == 3 for one in lines)
    # A pace has one color; its second line is dashed.
    assert len({group.get("stroke") for group in groups}) == 2
    assert [group.get("stroke-dasharray") is not None for group in groups].count(True) == 2
    names = [one.text for one in drawn.iter() if one.tag.endswith("text")]
    assert "allreduce, 2 per host" in names


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--workers", "0"], "from 1 to 100000"),
        (["--link", "0mbit"], "nothing can be sent"),
        (["--paces", "gossip:ring"], "cannot be planned"),
        (["--paces", "alreduce"], "allreduce"),
        (["--straggler", "3x20", "--workers", "4"], "20 workers are slow, but there are 4"),
        (["--mtbf", "0h"], "above 0"),
        (["--plot", "x.svg"], "add --sweep"),
        (["--sweep", "hosts=1,2"], "workers=8,64,512"),
        (["--cluster", "none.yaml"], "No such file"),
    ],
)
def test_wrong_options_are_explained(model, capsys, words, error):
    code, _, err = run(capsys, *words, model)
    assert code == 2 and error in err and len(err.splitlines()) == 1


def test_it_needs_no_torch(model):
    code = (
        "import sys\nfrom paceline.cli.main import main\ntry:\n"
        f"    main(['simulate', '--steps', '2', {model!r}])\n"
        "except SystemExit as end:\n    assert end.code == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
