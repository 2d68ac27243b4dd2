"""--sync: which files reach the hosts, by rsync and by tar, and what stays there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from driver import Driver

from paceline.errors import ConfigError
from paceline.launcher.engines.project_files import find_project_files

ODD = "it's $(x) \n é.txt"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "my project"
    texts = {"train.py": "1", "package/a.py": "2", f"data/{ODD}": "3", "runs/x/log": "no"}
    for name, text in {
        **texts,
        ".venv/bin/python": "no",
        "package/__pycache__/a.pyc": "no",
    }.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    (made / "link").symlink_to("train.py")
    (made / "train.py").chmod(0o755)
    return made


COPIED = ["data/" + ODD, "link", "package/a.py", "train.py"]


def git(project: Path, *words: str) -> None:
    command = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@t", *words]
    subprocess.run(command, check=True, capture_output=True)


def test_files_without_git(project):
    files = find_project_files(project)
    assert list(files.names) == COPIED
    assert files.num_bytes == 3 + len("train.py")


def test_files_with_git(project):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("data/\n")
    (project / "gone.py").write_text("x")
    git(project, "add", "-A", ":!package")
    (project / "gone.py").unlink()
    assert list(find_project_files(project).names) == [".gitignore", *COPIED[1:]]
    assert list(find_project_files(project / "package").names) == ["a.py"]


def test_too_large_and_home_are_refused(project, monkeypatch):
    with pytest.raises(ConfigError, match=r"would copy 11 B .* the largest parts are link \(8 B\)"):
        find_project_files(project, max_bytes=10)
    monkeypatch.setenv("HOME", str(project))
    with pytest.raises(ConfigError, match="change to the directory of the project first"):
        find_project_files(project)


def contents(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir())


@pytest.mark.cluster
@pytest.mark.parametrize("has_rsync", [True, False])
def test_the_copy_follows_the_project_and_keeps_what_jobs_wrote(
    cluster, tmp_path, project, has_rsync
):
    driver = Driver(cluster, tmp_path)

    def sync():
        return driver.run("b", "c", sync=str(project), has_rsync=has_rsync, invitation={"ends": 1})

    copied, _ = sync()
    assert copied["problems"] == {} and copied["num_files"] == 4
    for name in ("b", "c"):
        copy = Path(copied["directories"][name])
        assert copy.is_relative_to(cluster[name].home)
        assert contents(copy) == [".paceline-sync", *COPIED]
        assert (copy / "data" / ODD).read_text() == "3"
        assert (copy / "link").readlink() == Path("train.py")
        assert (copy / "train.py").stat().st_mode & 0o777 == 0o755
        assert driver.seen(name)["directory"] == str(copy)
    copy = Path(copied["directories"]["b"])
    (copy / "checkpoint").write_text("mine")
    (project / "package" / "a.py").unlink()
    (project / "train.py").write_text("new")
    sync()
    assert contents(copy) == [".paceline-sync", "checkpoint", *COPIED[:2], "train.py"]
    assert (copy / "train.py").read_text() == "new"


@pytest.mark.cluster
def test_every_host_without_a_copy_is_named(cluster, tmp_path, project):
    shutil.rmtree(cluster["c"].home / ".cache", ignore_errors=True)
    (cluster["c"].home / ".cache").write_text("a file where a directory should be")
    copied, _ = Driver(cluster, tmp_path).run(
        "b", "c", "nosuch", sync=str(project), invitation={"ends": 1}
    )
    (cluster["c"].home / ".cache").unlink()
    assert list(copied["directories"]) == ["b"]
    assert "cannot copy the project to host c" in copied["problems"]["c"]
    assert "host nosuch is unknown" in copied["problems"]["nosuch"]
