"""A hook of mkdocs: the page about the command line is what `paceline VERB --help` prints."""

from __future__ import annotations

from typing import Any

import typer
from mkdocs.structure.pages import Page

from paceline.cli.main import app
from paceline.cli.paces import listing

PAGE = "reference/command-line.md"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Append a section for each verb."""
    if page.file.src_uri != PAGE:
        return markdown
    root = typer.main.get_command(app)
    return markdown + "".join(_sections(root, ("paceline",)))


def _sections(command: Any, names: tuple[str, ...]) -> list[str]:
    context = command.make_context(" ".join(names), [], resilient_parsing=True)
    context.terminal_width = context.max_content_width = 96
    title = " ".join(names)
    sections = [f"\n## {title}\n\n```text\n{command.get_help(context)}\n```\n"]
    if names[1:] == ("paces",):
        sections += [f"\nIt prints:\n\n```text\n{listing()}```\n"]
    for name, nested in getattr(command, "commands", {}).items():
        sections += _sections(nested, (*names, name))
    return sections
