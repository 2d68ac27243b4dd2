"""Runs one container as kubelet would: its mounts, its user, its environment, its own process 1.

    unshare --mount --pid --fork --mount-proc python container.py < container.json

The files of this machine are the image. All of them are read-only, but for the volumes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KEPT = "/run/kept"


def main() -> None:
    wanted = json.load(sys.stdin)
    for path, source in wanted["claims"].items():
        assert path.startswith("/run/"), "elsewhere the directory would be made on this machine"
        mount("--bind", source, path)
    keep(wanted["image"])
    for path in wanted["scratch"]:
        mount("-t", "tmpfs", "-o", f"mode=2777,gid={wanted['group']}", "tmpfs", path)
    unkeep(wanted["image"])
    for path, files in wanted["secrets"].items():
        mount_secret(path, files, wanted["mode"], wanted["group"])
    for path in ("/", "/run"):
        mount("-o", "remount,bind,ro", path)
    os.chdir(wanted["directory"])
    user = [f"--reuid={wanted['user']}", f"--regid={wanted['user']}", f"--groups={wanted['group']}"]
    powers = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    command = ["setpriv", *user, *powers, "--", *wanted["command"]]
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.execvpe("setpriv", command, wanted["environ"])


def mount(*words: str) -> None:
    if not words[0].startswith("-o"):
        Path(words[-1]).mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *words], check=True)


def keep(paths: list[str]) -> None:
    """Keep directories that a volume will cover, and those that only root can reach."""
    for number, path in enumerate(paths):
        mount("--rbind", path, f"{KEPT}/{number}")
    if any(path.startswith("/root/") for path in paths):
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/root")


def unkeep(paths: list[str]) -> None:
    for number, path in enumerate(paths):
        Path(path).mkdir(parents=True, exist_ok=True)
        mount("--rbind", f"{KEPT}/{number}", path)
        mount("-o", "remount,bind,ro", path)


def mount_secret(path: str, files: dict[str, str], mode: int, group: int) -> None:
    """kubelet makes root's files readable for the pod's group, and links to them."""
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", path)
    data = Path(path) / "..2026"
    data.mkdir()
    for name, text in files.items():
        (data / name).write_text(text)
        os.chown(data / name, 0, group)
        (data / name).chmod(mode | (0o040 if group else 0))
        (Path(path) / name).symlink_to(f"..data/{name}")
    (Path(path) / "..data").symlink_to("..2026")
    mount("-o", "remount,ro", path)


if __name__ == "__main__":
    main()
