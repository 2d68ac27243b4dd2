"""A hook of mkdocs: links that leave docs/ lead to a copy of their target within the site.

Pages link to examples, to CONTRIBUTING and the like, which people read in the repository. In the
site such a link gets a page of its own: Markdown as it is, a program as a block of code. A link to
a directory becomes plain words. A link to a file that does not exist ends the build. The page of
decisions (adr/) lists what is there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# A link or picture, with its words, target and anchor; not within a line of code.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```\s*?$)", re.MULTILINE | re.DOTALL)
_WRITTEN_AS = {".py": "python", ".cc": "cpp", ".h": "cpp", ".toml": "toml"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages for what is linked outside of docs/, also from these themselves."""
    waiting = [Path(config["docs_dir"]) / page.src_uri for page in files.documentation_pages()]
    known: set[str] = set()
    while waiting:
        source = waiting.pop()
        for target in _targets(source.read_text(), source.parent):
            uri = _uri(target)
            if uri is None or uri in known:
                continue
            known.add(uri)
            waiting += [target] if target.suffix == ".md" else []
            files.append(File.generated(config, uri, content=_content(target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of one page."""
    uri = page.file.src_uri
    if uri == "adr/index.md":
        markdown += "\n" + "\n".join(_decisions())
    outside = uri.startswith("outside/")
    origin = _source(uri) if outside else ROOT / "docs" / uri
    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda m: _link(m, origin, uri), part)
        for part in parts
    )


def _targets(text: str, directory: Path) -> list[Path]:
    prose = _FENCE.sub("", text)
    return [(directory / m[3]).resolve() for m in _LINK.finditer(prose) if "://" not in m[3]]


def _link(match: re.Match[str], origin: Path, uri: str) -> str:
    mark, words, where, anchor = match[1], match[2], match[3], match[4] or ""
    if "://" in where or where.startswith("mailto:"):
        return match[0]
    target = (origin.parent / where).resolve()
    if target.is_dir():
        return words
    if not target.exists():
        raise PluginError(f"{origin.relative_to(ROOT)} links to {where}, which does not exist")
    to = _uri(target) or target.relative_to(ROOT / "docs").as_posix()
    return f"{mark}[{words}]({posixpath.relpath(to, posixpath.dirname(uri))}{anchor})"


def _uri(target: Path) -> str | None:
    """Where the site has a file; None for what is in docs/ anyway."""
    if target.is_dir() or (target.is_relative_to(ROOT / "docs") and target.suffix != ".py"):
        return None
    if not target.is_relative_to(ROOT) or not target.exists():
        return None
    name = target.relative_to(ROOT).as_posix()
    return f"outside/{name if name.endswith('.md') else name + '.md'}"


def _source(uri: str) -> Path:
    path = ROOT / uri.removeprefix("outside/")
    return path if path.exists() else path.with_suffix("")


def _content(target: Path) -> str:
    text = target.read_text()
    if target.suffix == ".md":
        return text
    language = _WRITTEN_AS.get(target.suffix, "text")
    return f"# {target.relative_to(ROOT)}\n\n````{language}\n{text}\n````\n"


def _decisions() -> list[str]:
    pages = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    titles = [path.read_text().partition("\n")[0].removeprefix("# ") for path in pages]
    numbered = [re.sub(r"^(\d+)\. ", r"\1: ", title) for title in titles]
    return [f"- [{t}]({path.name})" for t, path in zip(numbered, pages, strict=True)]
