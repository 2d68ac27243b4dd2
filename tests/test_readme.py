"""What the README tells a person to type works, and the Chinese one tells the same."""

from __future__ import annotations

import re

import pytest

from support.pages import ROOT, Setup, blocks_of, run_script, scripts_of, without_comments
from test_guides import check, words_of

READMES = ("README.md", "README.zh-CN.md")
# The code of both is the same, so one of them is run.


def test_the_script_runs_on_two_ranks_and_alone() -> None:
    script = scripts_of("README.md")[""]
    same = "pl.check_consistency(model)"
    first, second = run_script(script, Setup(result=same))
    assert first[0] == second[0]
    run_script(script, Setup(workers=0))


@pytest.mark.parametrize("page", READMES)
def test_commands_are_understood(page, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    commands = words_of(page)
    assert len(commands) >= 9 and ["make", "demo"] in commands and ["make", "test"] in commands
    for words in commands:
        check(words)


def test_make_has_few_verbs_and_all_are_named() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    assert len(verbs) <= 14
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"make {verb} does not exist"
        assert re.search(rf"^# .*make {verb} ", makefile, re.MULTILINE), f"{verb} is not explained"
    for page in READMES:
        (tree,) = [b.text for b in blocks_of(page) if b.text.startswith("paceline/")]
        named = re.search(r"Makefile +(.*)$", tree, re.MULTILINE)[1].split()
        assert set(named) == set(verbs), page


@pytest.mark.parametrize("page", READMES)
def test_it_is_one_page_and_its_links_lead_somewhere(page) -> None:
    text = (ROOT / page).read_text()
    assert len(text.splitlines()) <= 160
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert len(links) > 20
    assert not [link for link in links if not (ROOT / link).exists()]


def test_both_have_the_same_code() -> None:
    english, chinese = ([b for b in blocks_of(page) if b.language != "text"] for page in READMES)
    assert len(english) == 3
    for one, other in zip(english, chinese, strict=True):
        assert one.language == other.language
        stripped = [
            [line.rstrip() for line in without_comments(block.text).splitlines()]
            for block in (one, other)
        ]
        assert stripped[0] == stripped[1]


def test_both_have_the_same_tree_figures_and_links() -> None:
    english, chinese = ((ROOT / page).read_text() for page in READMES)
    names = re.compile(r"^[│ ]*[├└]── (\S+)", re.MULTILINE)
    assert names.findall(english) == names.findall(chinese)
    assert _tables(english) == _tables(chinese)
    assert len(_tables(english)) == 3
    link = re.compile(r"\]\(([^)]+)\)")
    others = {"README.md", "README.zh-CN.md"}
    assert set(link.findall(english)) - others == set(link.findall(chinese)) - others


def _tables(text: str) -> list[list[list[str]]]:
    """Of each table and row the numbers and the words in code: the same in any language."""
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [sorted(re.findall(r"`[^`]+`|\d+(?:\.\d+)?", row)) for row in table.splitlines()]
        for table in tables
    ]
