"""Phrases of an earlier private language that must not come back, each with what to write instead.

`make check` runs codespell as well. A phrase here is a regular expression that plain technical
English has no use for; where it has one, the phrase is not listed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTEAD = {
    r"\"\"\"Say\b": "Return, Log, Print or Raise",
    r"\bwhoever\b": "the worker, the process ...: name the actor",
    r"\b(some|no|any)body\b": "name the actor: no worker, any process",
    r"\bin good order\b": "cleanly",
    r"\bmakes? way\b": "exits, so that a replacement can start",
    r"\broll call\b": "used-parameter mask",
    r"\bbehind (step|the step|each step|every step|the last|it all)\b": "after",
    r"\bth part of the (bytes|time|memory)\b": "1/80 of the bytes",
    r"\bis said\b|\bwas said\b|\bare said\b": "is logged, is reported",
    r"\bwhat becomes of\b": "what happens to",
    r"\bnow this, now that\b": "a different one each time",
    r"\b(costs|costing) the record\b": "recording stops, training continues",
}
SKIPPED = ("docs/log.md", "docs/adr/", "CHANGELOG.md", "README.zh-CN.md", "tests/test_prose.py")
SUFFIXES = (".py", ".pyi", ".md", ".cc", ".h")
FOLDERS = (
    *("src", "cpp", "docs", "examples", "bench", "testing"),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
)


def test_the_text_has_none_of_the_phrases() -> None:
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    patterns = {re.compile(phrase, re.IGNORECASE): word for phrase, word in INSTEAD.items()}
    found = []
    for name in listed.stdout.split():
        if not name.endswith(SUFFIXES) or name.startswith(SKIPPED):
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            for pattern, instead in patterns.items():
                if match := pattern.search(line):
                    found.append(f"{name}:{number}: {match[0]!r}: write {instead}")
    assert not found, "\n".join(found)
