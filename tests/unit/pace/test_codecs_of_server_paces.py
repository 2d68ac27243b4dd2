"""Codecs that servers cannot read are refused before anything starts, with the reason."""

from __future__ import annotations

import pytest

from paceline.compress import registry as known
from paceline.compress.registry import parse_codec
from paceline.pace.parse import find_problem_with_codec, parse, parse_schedule

REFUSED = {
    "ps[compress=randomk:0.1]": "same indices",
    "async[compress=powersgd:2]": "two averages in a row",
    "ssp:3[compress=int8(scales=shared)]": "leave out scales=shared",
    "async[compress=int8, push=delta]": "use push=grad",
    "ssp:1[compress=topk:0.1, push=params]": "use push=grad",
    "ps, async[compress=randomk:0.1]@100": "those that can: fp16, bf16, int8",
}


@pytest.mark.parametrize("pace", REFUSED)
def test_what_servers_cannot_do_is_refused(pace: str) -> None:
    assert REFUSED[pace] in parse_schedule(pace).find_problem(2, 1)


@pytest.mark.parametrize("pace", ["ps", "backup:1", "async", "ssp:3"])
@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.01+int8", "onebit(min=0)", "dgc:0.01"])
def test_what_they_can_do_is_not(pace: str, codec: str) -> None:
    read = parse(f"{pace}[compress={codec}]")
    assert read.options["compress"] == codec
    assert find_problem_with_codec(read, read.options) == ""


def test_randomk_is_a_matter_of_the_workers_where_there_are_no_servers() -> None:
    assert parse_schedule("allreduce[compress=randomk:0.1]").find_problem(2, 0) == ""


def test_servers_do_not_know_codecs_of_a_script() -> None:
    known.register("of_a_script", object)
    try:
        assert "do not run the script" in parse_codec("of_a_script").why_no_servers
    finally:
        del known.CODECS["of_a_script"]
