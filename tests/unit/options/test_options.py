"""The option table agrees with itself, and the guides with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
import typer

from paceline.cli.main import app, main
from paceline.compress.registry import CODECS
from paceline.options.grammar import Number
from paceline.options.table import At, Options, options_at
from paceline.pace.registry import KNOWN

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "docs"))
import command_line  # noqa: E402
import option_tables  # noqa: E402


@pytest.mark.parametrize("page", option_tables.PAGES)
def test_the_tables_of_a_guide_are_those_of_the_declarations(page: str) -> None:
    text = (option_tables.GUIDES / f"{page}.md").read_text(encoding="utf-8")
    assert "options" in text and option_tables.fill(text) == text, "run docs/option_tables.py"


def test_the_tables_have_every_option_of_every_pace() -> None:
    pages = [(option_tables.GUIDES / f"{page}.md").read_text() for page in option_tables.PAGES]
    covered = set[tuple[str, str]]().union(*(option_tables.covered(text) for text in pages))
    rows = [(name, row) for name, row in KNOWN.items() if not row.stands_for]
    assert covered == {
        (name, o.name) for name, row in [*rows, *CODECS.items()] for o in row.options
    }


def test_a_pace_has_an_option_once() -> None:
    for name, row in [*KNOWN.items(), *CODECS.items()]:
        names = [option.name for option in row.options]
        assert len(names) == len(set(names)), name


def test_paces_that_options_name_exist() -> None:
    hints = get_type_hints(Options, include_extras=True).values()
    places = [at for hint in hints for at in getattr(hint, "__metadata__", ())]
    assert len(places) > 20 and all(isinstance(at, At) for at in places)
    assert {pace for at in places for pace in at.paces} <= KNOWN.keys()


def test_the_default_of_a_field_is_what_the_table_says() -> None:
    hints = get_type_hints(Options, include_extras=True)
    for field in msgspec.structs.fields(Options):
        for at in getattr(hints[field.name], "__metadata__", ())[:1]:
            pace = at.paces[0]
            [option] = [one for one in options_at(pace) if one.name == field.name]
            assert option.otherwise or option.value_of(option.default_text or "") == field.default
            if isinstance(at.kind, Number):
                wanted = int if at.kind.is_whole else float
                assert wanted in _types(hints[field.name].__origin__), field.name


def _types(hint: object) -> tuple[object, ...]:
    return get_args(hint) or (hint,)


def test_all_are_listed(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["paces"])
    assert end.value.code == 0
    listed = capsys.readouterr().out
    for name, row in KNOWN.items():
        assert row.stands_for or f"\npace {name}" in f"\n{listed}", name
    page = "".join(command_line._sections(typer.main.get_command(app), ("paceline",)))
    assert listed in page, "the reference of the command line has it too"
    with pytest.raises(SystemExit) as end:
        main(["paces", "topc"])
    assert end.value.code == 2 and "did you mean topk?" in capsys.readouterr().err
