"""Texts of codecs: what is parsed, and the errors for what cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.compress.registry import CODECS, VALUE_CODECS, CodecSpec, parse_codec, register
from paceline.errors import UsageError
from paceline.options.grammar import COUNT, SHARE, WHOLE, Number, number_text

_NUMBERS = {
    SHARE: st.floats(0, 1, exclude_min=True),
    WHOLE: st.integers(1, 10**9).map(float),
    COUNT: st.integers(0, 10**9).map(float),
}


def _specs(name: str) -> st.SearchStrategy[CodecSpec]:
    row = CODECS[name]
    options = {
        one.name: st.integers(1, 9).map(number_text)
        if isinstance(one.kind, Number)
        else st.sampled_from(one.kind)
        for one in row.options
    }
    number = st.none() | _NUMBERS[row.kind] if row.number else st.none()
    values = st.sampled_from(("", *VALUE_CODECS)) if row.has_values else st.just("")
    chosen = st.fixed_dictionaries({}, optional=options)
    return st.builds(CodecSpec, st.just(name), number, chosen, values)


@given(st.sampled_from(sorted(CODECS)).flatmap(_specs))
def test_a_codec_survives_being_written_and_read(spec: CodecSpec) -> None:
    assert parse_codec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inte8", "did you mean int8?"),
        ("zip", "there are: auto, none, fp16, bf16, int8"),
        ("int8:4", "int8 takes no number"),
        ("topk:0", "the fraction of values must be a number above 0, up to 1 (got '0')"),
        ("topk:1.5", "write for example topk:0.01"),
        ("powersgd:1.5", "the rank must be a whole number above 0"),
        ("topk:nan", "must be a number above 0"),
        ("int8(scale=shared)", "did you mean scales?"),
        ("int8(scales=common)", "allowed: own, shared"),
        ("int8(min=-1)", "expected a whole number, 0 or more"),
        ("int8(min=1,min=2)", "given twice"),
        ("int8(min)", "expected option=value"),
        ("int8+fp16", "those that do: topk, dgc"),
        ("topk+topk", "values can be fp16, bf16, int8"),
        ("topk(", "write name, name:number"),
        ("", "there is no such codec"),
        (8, "write name"),
        ("x" * 500, "..."),
    ],
)
def test_errors_name_what_is_wrong(text: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_codec(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults() -> None:
    assert parse_codec("topk").value == 0.01
    assert parse_codec("topk").is_chosen("feedback")
    assert not parse_codec("int8").is_chosen("feedback")
    assert parse_codec("int8").min_elements == 1024
    assert parse_codec("int8(min=3)").min_elements == 3
    assert not parse_codec("none").is_on


def test_a_word_is_taken_once() -> None:
    with pytest.raises(UsageError, match="there is a codec int8 already"):
        register("int8", "somewhere:Else")
    with pytest.raises(UsageError, match="one word of letters"):
        register("in t", "somewhere:Else")
