"""Bytes become lines: any cut of the stream gives the same lines, and memory stays bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.display.lines import LineSplitter, printable


def _lines(pieces: list[bytes], limit_bytes: int = 50) -> list[str]:
    splitter = LineSplitter(limit_bytes=limit_bytes)
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return [*lines, *splitter.finish()]


@given(st.lists(st.binary(max_size=120).map(lambda b: b.replace(b"\r", b"")), max_size=8))
def test_lines_do_not_depend_on_how_the_stream_was_cut(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert _lines(pieces) == _lines([whole]) == _lines([bytes([b]) for b in whole])


def test_long_lines_are_cut_with_a_note() -> None:
    (line,) = _lines([b"x" * 40, b"y" * 60], limit_bytes=50)
    assert line.startswith("x" * 40 + "y" * 10 + " ... [line of 100 bytes cut here")


def test_a_progress_bar_shows_its_last_state() -> None:
    assert _lines([b"10%\r", b"20%\r30%", b"\r100%\n"]) == ["100%"]
    assert _lines([b"10%\r", b"20%\r"]) == ["20%"]
    assert _lines([b"windows\r\nline\r\n"]) == ["windows", "line"]


def test_a_long_running_bar_takes_no_memory() -> None:
    splitter = LineSplitter(limit_bytes=100)
    for percent in range(1000):
        assert list(splitter.feed(b"%d%%\r" % percent)) == []
    assert list(splitter.finish()) == ["999%"]


def test_only_colours_pass_as_control_sequences() -> None:
    assert printable(b"\x1b[31mred\x1b[0m\ttab") == "\x1b[31mred\x1b[0m\ttab"
    assert printable(b"\x1b[2J\x1b]0;title\x07\x00") == r"\x1b[2J\x1b]0;title\x07\x00"
    assert printable(b"caf\xc3\xa9 \xff \xc2\x9b") == "caf\u00e9 \\xff \\x9b"


@given(st.binary())
def test_what_is_shown_has_no_control_byte_but_tab_and_colour(raw: bytes) -> None:
    shown = printable(raw).replace("\t", "")
    assert all(c.isprintable() or c == "\x1b" or ord(c) >= 0xA0 for c in shown)
