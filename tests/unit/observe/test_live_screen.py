"""The live screen, as a terminal shows it: a small one is emulated here."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.observe.display.board import BoardSnapshot, ProcessRow
from paceline.observe.display.screen import LiveScreen, PlainScreen
from paceline.runtime.process_names import ProcessName

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


def _shown(data: str) -> list[str]:
    """Return the lines of a terminal after these bytes: only what the screen uses is understood."""
    lines, row, column = [""], 0, 0
    for found in _SEQUENCE.finditer(data):
        text, (number, letter) = found.group(), found.groups()
        if text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text == "\r":
            column = 0
        elif letter == "A":
            assert row >= int(number), "it does not go above what it printed"
            row -= int(number)
        elif letter == "J":
            lines[row:] = [lines[row][:column]]
        elif letter is None:
            lines[row] = lines[row][:column] + text
            column += 1
    return lines


class _Terminal:
    def __init__(self, **options: bool) -> None:
        self._reading, fd = os.pipe()
        self.screen = LiveScreen(fd, **options)
        self._fd, self.data = fd, b""

    def read(self) -> list[str]:
        """Return what is to be seen by now."""
        return _shown(self.read_bytes().decode())

    def read_bytes(self) -> bytes:
        os.set_blocking(self._reading, False)
        try:
            while piece := os.read(self._reading, 1 << 16):
                self.data += piece
        except BlockingIOError:
            pass
        return self.data

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._fd)


@contextmanager
def _terminal(**options: bool) -> Iterator[_Terminal]:
    terminal = _Terminal(**options)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(autouse=True)
def _size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "20")


def _picture(step: int, words: tuple[str, ...] = ()) -> BoardSnapshot:
    rows = [ProcessRow(label=str(k), step=step, values={}, state="running") for k in range(2)]
    return BoardSnapshot((), rows, f"step {step}", words)


_TITLE = "rank   step   steps/s   state"


def test_lines_scroll_above_the_table() -> None:
    with _terminal() as terminal:
        screen = terminal.screen
        screen.progress(_picture(1))
        screen.settle()
        assert [line.strip() for line in terminal.read()[:2]] == [
            _TITLE,
            "0      1         -   running",
        ]
        screen.output_line(ProcessName(0, 0), False, "hello")
        screen.output_line(ProcessName(1, 1), True, "\x1b[31mred")
        screen.progress(_picture(2))
        screen.settle()
        lines = terminal.read()
        assert lines[:3] == ["[0] hello", "[1] red", _TITLE]
        assert lines[3:5] == ["   0      2         -   running", "   1      2         -   running"]
        assert b"\x1b[31mred\x1b[0m" in terminal.data, "colours end with their line"
        screen.close()
        assert terminal.read() == ["[0] hello", "[1] red", ""], "the table is gone"
        assert terminal.data.endswith(b"\x1b[?25h"), "and the cursor is back"


def test_a_table_that_has_not_changed_is_not_painted() -> None:
    with _terminal() as terminal:
        for _ in range(5):
            terminal.screen.progress(_picture(7))
            terminal.screen.settle()
        terminal.read()
        assert terminal.data.count(b"steps/s") == 1


def test_many_lines_are_one_painting() -> None:
    with _terminal() as terminal:
        terminal.screen.progress(_picture(7))
        terminal.screen.settle()
        for number in range(50):
            terminal.screen.output_line(ProcessName(0, 0), False, f"line {number}")
        terminal.screen.settle()
        assert terminal.read()[:50] == [f"[0] line {number}" for number in range(50)]
        assert terminal.data.count(b"steps/s") == 2


def test_a_terminal_that_became_narrow_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    with _terminal() as terminal:
        terminal.screen.progress(_picture(7, ("w" * 30,)))
        terminal.screen.settle()
        before = len(terminal.read_bytes())
        monkeypatch.setenv("COLUMNS", "25")  # the four lines are longer, and take two each by now
        terminal.screen.progress(_picture(8))
        terminal.screen.settle()
        assert terminal.read_bytes()[before:].startswith(b"\r\x1b[8A\x1b[J")


def test_without_colours_there_are_none() -> None:
    with _terminal(has_colours=False) as terminal:
        terminal.screen.say("words")
        terminal.screen.output_line(ProcessName(0, 0), False, "line")
        terminal.screen.settle()
        terminal.read()
        assert terminal.data == b"words\n[0] line\n"


def test_a_terminal_that_is_gone_is_no_error() -> None:
    reading, fd = os.pipe()
    os.close(reading)
    screen = LiveScreen(fd)
    screen.say("nobody hears this")
    screen.settle()
    screen.summary(lambda _width, _height: ["nor this"])
    os.close(fd)


def test_a_reader_that_does_not_wait_gets_everything() -> None:
    reading, fd = os.pipe()
    os.set_blocking(fd, False)
    text, got = "x" * 500_000, bytearray()

    def read() -> None:
        while piece := os.read(reading, 4096):
            got.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    PlainScreen(fd, fd).say(text)
    os.close(fd)
    reader.join(60)
    os.close(reading)
    assert got.decode() == text + "\n"


def test_a_plain_line_comes_once() -> None:
    reading, fd = os.pipe()
    screen = PlainScreen(fd, fd)
    for step in (1, 1, 2):
        screen.progress(_picture(step))
    os.close(fd)
    with open(reading) as lines:
        assert lines.read() == "paceline: step 1\npaceline: step 2\n"
