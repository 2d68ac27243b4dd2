"""The lines for a person: where they go by default, and that an application can take them over.

Every test is a process of its own: `logging` is one per process, and pytest has handlers there.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HANDLER = """
import logging, sys
class Mine(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage())
logger = logging.getLogger("paceline")
"""


def run(code: str, *, closes_stderr: bool = False) -> tuple[str, str]:
    words = [sys.executable, "-c", code]
    if closes_stderr:
        words = ["sh", "-c", 'exec "$@" 2>&-', "sh", *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


def test_lines_have_one_prefix_and_go_to_stderr():
    code = (
        "from paceline.runtime.console import say, warn; say('100 %s of it'); warn('two\\nlines')"
    )
    assert run(code) == ("", "paceline: 100 %s of it\npaceline: two\nlines\n")


def test_an_application_that_sets_up_logging_sees_each_line_once():
    code = "import logging; logging.basicConfig(level='DEBUG'); {0}; say('once')"
    assert run(code.format("from paceline.runtime.console import say"))[1] == "paceline: once\n"
    asked = "from paceline.runtime.console import say, logger; logger.propagate = True"
    both = run(code.format(asked))[1]
    assert both == "paceline: once\nINFO:paceline:once\n"


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_application_redirects_the_lines(order):
    add, load = "logger.handlers = [Mine()]", "from paceline.runtime.console import say, warn"
    first, second = (add, load) if order == "before" else (load, add)
    told = run(f"{HANDLER}\n{first}\n{second}\nsay('a fact'); warn('a worry')")
    assert told == ("INFO a fact\nWARNING a worry\n", "")


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_application_silences_the_lines(order):
    level, load = "logger.setLevel('WARNING')", "from paceline.runtime.console import say, warn"
    first, second = (level, load) if order == "before" else (load, level)
    assert run(f"{HANDLER}\n{first}\n{second}\nsay('no'); warn('yes')") == ("", "paceline: yes\n")


def test_records_of_the_control_plane_have_the_prefix_too():
    code = "import logging, paceline.runtime.console;"
    code += "logging.getLogger('paceline.control').warning('late')"
    assert run(code) == ("", "paceline: late\n")


def test_lines_follow_a_stderr_that_was_replaced():
    code = """
import contextlib, io
from paceline.runtime.console import say
with contextlib.redirect_stderr(io.StringIO()) as taken:
    say("inside")
print(repr(taken.getvalue()))
say("outside")
"""
    assert run(code) == ("'paceline: inside\\n'\n", "paceline: outside\n")


def test_a_fork_neither_loses_nor_doubles_a_line():
    code = """
import os
from paceline.runtime.console import say
say("parent")
if os.fork() == 0:
    say("child")
    os._exit(0)  # no flush at the end
os.wait()
say("parent again")
"""
    assert run(code)[1] == "paceline: parent\npaceline: child\npaceline: parent again\n"


def test_a_process_without_stderr_goes_on():
    code = "from paceline.runtime.console import say; say('to nobody'); print('went on')"
    assert run(code, closes_stderr=True) == ("went on\n", "")


def test_a_program_whose_lines_are_read_by_the_launcher_has_another_prefix():
    code = "from paceline.runtime.console import say, set_prefix;"
    code += "set_prefix('coordinator: '); say('here')"
    assert run(code)[1] == "coordinator: here\n"
