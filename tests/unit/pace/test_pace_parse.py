"""The text of a pace: what is read, what it is written back as, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.compress.registry import CODEC
from paceline.errors import UsageError
from paceline.options.grammar import Kind, number_text
from paceline.pace import registry as known
from paceline.pace.parse import PaceSpec, notice_of, parse
from paceline.pace.registry import KNOWN, Pace


def _numbers() -> dict[Kind, st.SearchStrategy[float]]:
    positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    return {
        known.ABOVE_0: positive,
        known.FROM_0: st.just(0.0) | positive,
        known.WHOLE: st.integers(1, 10**9).map(float),
        known.COUNT: st.integers(0, 10**9).map(float),
        known.SHARE: st.floats(0, 1, exclude_min=True),
    }


def _specs_of(name: str) -> st.SearchStrategy[PaceSpec]:
    kinds = {kind: numbers.map(number_text) for kind, numbers in _numbers().items()}
    kinds[CODEC] = st.sampled_from(["none", "int8", "topk:0.01(feedback=no,min=8)+int8"])
    options = {
        one.name: kinds[one.kind] if one.kind in kinds else st.sampled_from(one.kind)
        for one in KNOWN[name].options
    }
    row, number = KNOWN[name], st.none()
    if row.has_words:
        number = st.none() | st.sampled_from(row.kind)
    elif row.number:
        number = st.none() | _numbers()[row.kind]
    return st.builds(PaceSpec, st.just(name), number, st.fixed_dictionaries({}, optional=options))


def _specs() -> st.SearchStrategy[PaceSpec]:
    own = [name for name, row in sorted(KNOWN.items()) if not row.stands_for]
    return st.sampled_from(own).flatmap(_specs_of)


@given(_specs())
def test_a_pace_survives_being_written_and_read(spec: PaceSpec) -> None:
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


@given(st.text() | st.text(alphabet="alreducpts[]:=,3. \n", max_size=30))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    try:
        spec = parse(text)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 1000
    else:
        assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("allreduce", PaceSpec("allreduce"), "allreduce"),
        (" allreduce ", PaceSpec("allreduce"), "allreduce"),
        (
            "allreduce[update=sharded, bucket_mb = 8.0]",
            PaceSpec("allreduce", None, {"update": "sharded", "bucket_mb": "8"}),
            "allreduce[bucket_mb=8,update=sharded]",
        ),
        (
            "allreduce[bucket_mb=0.5]",
            PaceSpec("allreduce", None, {"bucket_mb": "0.5"}),
            "allreduce[bucket_mb=0.5]",
        ),
    ],
)
def test_what_is_read(text: str, spec: PaceSpec, canonical: str) -> None:
    assert parse(text) == spec
    assert str(parse(text)) == canonical


def test_numbers_are_written_short() -> None:
    assert str(PaceSpec("word", 3.0)) == "word:3"
    assert str(PaceSpec("word", 0.5, {"key": "value"})) == "word:0.5[key=value]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alreduce", ["no such pace", "did you mean allreduce?", "this version has: allreduce"]),
        ("AllReduce", ["did you mean allreduce?"]),
        ("ddp", ["no such pace; this version has: allreduce"]),
        ("", ["pace ''", "this version has: allreduce"]),
        ("allreduce:3", ["takes no number", "':3'"]),
        ("allreduce[", ["word[option=value"]),
        ("allreduce[update=auto]x", ["word[option=value"]),
        ("allreduce[]", ["expected option=value"]),
        ("allreduce[update]", ["expected option=value, found 'update'"]),
        ("allreduce[=auto]", ["expected option=value"]),
        ("allreduce[updat=auto]", ["no option 'updat'", "did you mean update?", "bucket_mb"]),
        ("allreduce[update=shard]", ["did you mean sharded?", "auto, replicated, sharded"]),
        ("allreduce[update=auto,update=auto]", ["given twice"]),
        ("allreduce[bucket_mb=0]", ["a number above 0"]),
        ("allreduce[bucket_mb=-1]", ["a number above 0"]),
        ("allreduce[bucket_mb=nan]", ["a number above 0"]),
        ("allreduce[bucket_mb=1e999]", ["a number above 0"]),
        ("allreduce[bucket_mb=1_0]", ["a number above 0"]),
        ("ssp:-1", ["the staleness must be a whole number, 0 or more (got '-1')", "ssp:3"]),
        ("ssp:x", ["the staleness must be a whole number, 0 or more (got 'x')"]),
        ("ssp:1.5", ["the staleness must be a whole number, 0 or more (got '1.5')"]),
        ("local:0", ["the number of local steps must be a whole number above 0", "local:8"]),
        ("partial:1.5", ["the fraction of workers must be a number above 0, up to 1"]),
        ("gossip:rings", ["did you mean ring?", "choose ring, exponential, random"]),
        ("lokal:3", ["did you mean local?"]),
        ("diloco[momentun=1]", ["did you mean momentum?"]),
        ("bitmap:3", ["bitmap takes no number"]),
        ("bitmap[feedback=maybe]", ["allowed: no, yes"]),
        ("bitmap[momentum=-1]", ["a number, 0 or more"]),
        ("bitmap[seed=1.5]", ["a whole number, 0 or more"]),
        ("bitmap[feedbak=yes]", ["did you mean feedback?"]),
        ("bmuf:10[nesterov=maybe]", ["allowed: yes, no"]),
        ("ps:2", ["ps takes no number"]),
        ("ps[compensate=dc]", ["ps has no option 'compensate'"]),
        ("async[compensate=d]", ["did you mean dc?"]),
        ("async[max_staleness=1.5]", ["a whole number, 0 or more"]),
        ("async[softsync=0]", ["a whole number above 0"]),
        ("ssp:3[unit=versions]", ["did you mean version?", "clock, version"]),
    ],
)
def test_a_mistake_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value)


def test_another_name_is_read_as_its_pace_with_a_notice() -> None:
    assert parse("elastic_sgd:0.25") == PaceSpec("partial", 0.25)
    assert "for the elastic force to a centre use easgd" in notice_of("elastic_sgd:0.25")
    assert parse("bmuf_bitmap[seed=3]") == PaceSpec("bitmap", None, {"seed": "3"})
    assert "for blockwise model-update filtering use bmuf" in notice_of("bmuf_bitmap[seed=3]")
    assert notice_of("partial:0.25") == "" and notice_of("[[") == ""


def test_a_pace_can_be_added_once() -> None:
    mine = Pace(number="the size", kind=known.WHOLE, default="4", method="mine:Method")
    known.register("mine", mine)
    try:
        known.register("mine", mine)
        assert parse("mine:5") == PaceSpec("mine", 5.0) and parse("mine").value == 4
        for name, row, words in (
            ("mine", Pace(method="other:Method"), "a pace mine exists already"),
            ("local", mine, "a pace local exists already"),
            ("a b", mine, "one word"),
            ("other", Pace(), "with a method"),
        ):
            with pytest.raises(UsageError, match=words):
                known.register(name, row)
    finally:
        del KNOWN["mine"]


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="got None"):
        parse(None)  # type: ignore[arg-type]


def test_reading_a_pace_needs_no_torch() -> None:
    code = "import sys, paceline.pace.parse; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
