"""Draw what a command prints on a terminal, as an SVG.

    python docs/images/terminal.py demo.svg "make demo" -- python examples/demo/compare.py

The command runs on a pseudo-terminal, so it shows what a person sees; of a live display the last
state stays, as on a real screen. The text before `--` is shown in place of the command.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 104


def record(command: list[str]) -> str:
    """Run the command on a pseudo-terminal and return the bytes that it wrote, as text."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS=str(WIDTH), LINES="40", TERM="xterm-256color")
        os.execvp(command[0], command)
    chunks = []
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.waitpid(pid, 0)
    return b"".join(chunks).decode(errors="replace")


def settle(output: str) -> list[str]:
    """Replay cursor movements by whole lines: what is left on the screen at the end."""
    lines, row = [""], 0
    for part in re.split(r"(\r\n|\n|\r|\x1b\[\d*[AKJ]|\x1b\[\?\d+[hl])", output):
        if part in ("\r\n", "\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif match := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(match[1] or 1))
        elif re.fullmatch(r"\x1b\[\d*J", part):  # from here to the end
            lines[row:] = [""]
        elif part == "\r" or re.fullmatch(r"\x1b\[\d*K", part):
            lines[row] = ""
        elif not part.startswith("\x1b[?"):
            lines[row] += part
    return lines


def main() -> None:
    border = sys.argv.index("--")
    target, command = sys.argv[1], sys.argv[border + 1 :]
    shown = " ".join(sys.argv[2:border]) or shlex.join(command)
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ {shown}", style="bold"))
    for line in settle(record(command).rstrip()):
        console.print(Text.from_ansi(line))
    console.save_svg(target, title="paceline")


if __name__ == "__main__":
    main()
