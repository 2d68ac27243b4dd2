"""Whatever a run calls its things, the page shows it as text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.observe.report.canvas import escaped
from paceline.observe.telemetry.events import (
    EpochEnded,
    MemberLost,
    Note,
    ProgressReport,
    RunEnded,
    RunStarted,
)
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from support.recorded import Parsed, page_of, training, whole

EVIL = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"'&amp;</style></svg>"
RTL = "\u05e9\u05dc\u05d5\u05dd"
names = st.text(max_size=80) | st.sampled_from(
    [EVIL, RTL, "\u202egpj.exe", "a\nb\r\nc", "x" * 10_000]
)


def named(name: str) -> str:
    """A page in which everything that can have a name has this one."""
    events = [
        (0.0, RunStarted(name, name, name, name, 2, 1, 0, name, name, name, name)),
        *training(name=name),
        *training(name=f"loss {name}"),
        (1.0, Note(0, name)),
        (1.0, MemberLost(name, 1, 1, name, name, 2)),
        (1.0, EpochEnded(0, name, 1, 100)),
        (1.0, TableReport(name, 0, 3, (WorkerReport(0, 3, {0: 2, 4: 1}, {1: 0.5}),))),
        (3.0, RunEnded(1, 3.0, name)),
    ]
    return page_of(events)


PLAIN = Parsed(named("plain"))


@settings(max_examples=25, deadline=None)
@given(names)
@example(EVIL)
def test_a_name_adds_no_element_and_no_attribute(name: str) -> None:
    page = Parsed(named(name))
    assert page.tags <= PLAIN.tags and "script" not in page.tags
    assert page.attributes <= PLAIN.attributes


@pytest.mark.parametrize("name", [EVIL[:40], RTL, "a & b", 'say "so"', "it's"])
def test_a_name_can_be_read(name: str) -> None:
    assert name in Parsed(named(name)).text


@settings(max_examples=300, deadline=None)
@given(st.text(), st.integers(2, 100))
def test_text_is_cut_and_stays_in_its_line(text: str, limit: int) -> None:
    html = escaped(text, limit)
    assert not set("<>\"'\n\r\x00\u202e") & set(html)
    (element,) = ElementTree.fromstring(f"<a><b>{html}</b></a>")
    assert len(element.text or "") <= limit


def test_long_names_do_not_make_long_pages() -> None:
    assert len(named("n" * 10_000)) < len(named("n" * 100)) + 5_000


def test_control_characters_become_visible() -> None:
    assert escaped("a\x1b[31mb\u202ec") == "a\ufffd[31mb\ufffdc"
    assert escaped("two\n  lines\t!") == "two lines !"


def test_drawings_are_well_formed() -> None:
    page = named(EVIL)
    drawings = page.split("<svg ")[1:]
    assert len(drawings) > 5
    for drawing in drawings:
        ElementTree.fromstring("<svg " + drawing.split("</svg>")[0] + "</svg>")


def test_the_policy_forbids_scripts_and_the_network() -> None:
    page = page_of(whole(training()))
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not {"script", "link", "img", "iframe", "object"} & Parsed(page).tags
    assert "http://" not in page and "https://" not in page and "url(" not in page


def test_names_of_values_are_kept_apart_from_markup_in_values() -> None:
    page = page_of(whole([(1.0, ProgressReport(0, 1, {"</svg><script>": 1.0}))]))
    assert "&lt;/svg&gt;&lt;script&gt;" in page
