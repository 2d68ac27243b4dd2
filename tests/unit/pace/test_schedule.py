"""Schedules as texts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.pace.parse import notices_of, parse_schedule


def test_a_schedule_is_read_and_written_in_one_form() -> None:
    text = "allreduce[update=sharded , bucket_mb=8.0]@0,ssp:3@2000 , diloco:50@ 10000"
    schedule = parse_schedule(text)
    assert [phase.start for phase in schedule.phases] == [0, 2000, 10000]
    assert [phase.pace.name for phase in schedule.phases] == ["allreduce", "ssp", "diloco"]
    written = "allreduce[bucket_mb=8,update=sharded]@0, ssp:3@2000, diloco:50@10000"
    assert str(schedule) == written and parse_schedule(written) == schedule
    assert schedule.needs_servers


def test_a_pace_alone_is_a_schedule() -> None:
    assert str(parse_schedule("local:8")) == "local:8"
    assert str(parse_schedule("local:8@0")) == "local:8"
    assert not parse_schedule("allreduce, local@7").needs_servers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("allreduce@5", "must begin at step 0"),
        ("allreduce, ps", "ps needs a step, such as ps@1000"),
        ("allreduce, ps@0", "does not begin after step 0 of allreduce"),
        ("allreduce, ps@9, local@9", "write the steps in order"),
        ("allreduce, ps@-3", "a whole number"),
        ("allreduce, ps@1e3", "a whole number"),
        ("allreduce, ps@", "a whole number"),
        ("allreduce, ps@" + "9" * 40, "a whole number"),
        ("allreduce, alreduce@3", "did you mean allreduce"),
        ("allreduce,", "no such pace"),
        ("", "no such pace"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_schedule(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@given(st.text(alphabet="alocdips:[]=@, 0123", max_size=40))
def test_nothing_but_usage_errors(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_schedule(str(parse_schedule(text))) == parse_schedule(text)


def test_notices_are_found_in_every_phase() -> None:
    (notice,) = notices_of("allreduce@0, elastic_sgd:0.5[carry=yes,seed=1]@3")
    assert "partial participation" in notice
