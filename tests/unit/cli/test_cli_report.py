"""`paceline report`: where the page goes, what is printed, and the exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from support.recorded import training, whole, write_record


@pytest.fixture
def report(capsys):
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["report", *map(str, words)])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


def test_the_page_is_in_the_directory_or_where_it_is_wanted(tmp_path: Path, report) -> None:
    run = write_record(tmp_path / "run", whole(training()))
    assert report(run) == (0, f"{run}/report.html\n", "")
    page = (run / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    other = tmp_path / "other.html"
    assert report(run, "-o", other) == (0, f"{other}\n", "")
    assert other.read_text() == page


def test_what_is_no_run_ends_with_2_and_one_line(tmp_path: Path, report) -> None:
    code, out, err = report(tmp_path)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"{tmp_path} has no events.jsonl; expected a run directory" in err
    (tmp_path / "events.jsonl").write_text('{"foreign": true}\n')
    code, _, err = report(tmp_path)
    assert code == 2 and "none of its 1 lines is an event of a run" in err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_to(tmp_path: Path, report) -> None:
    run = write_record(tmp_path / "run", whole([]))
    run.chmod(0o500)
    code, _, err = report(run)
    run.chmod(0o700)
    assert code == 2 and "Permission denied; name a file" in err


def test_an_output_that_cannot_be(tmp_path: Path, report) -> None:
    run = write_record(tmp_path / "run", whole([]))
    code, _, err = report(run, "-o", tmp_path / "no" / "page.html")
    assert code == 2 and "cannot write" in err and "No such file or directory" in err


def test_it_needs_no_torch(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", whole(training()))
    code = (
        "import sys\nfrom paceline.cli.main import _exit_code\n"
        f"assert _exit_code(['report', {str(run)!r}]) == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
