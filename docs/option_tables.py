"""Writes the tables of options in the guides: `python docs/option_tables.py`; a test compares them.

A table stands between two comments of a page. The first names the paces whose options it has:

    <!-- options: ps backup async ssp -->          all of them
    <!-- own options: local diloco -->             without those that nearly all paces have
    <!-- common options -->                        these
    <!-- codec options -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.compress.registry import CODECS
from paceline.options.grammar import Option
from paceline.pace.registry import KNOWN, Pace

GUIDES = Path(__file__).parent / "guides"
PAGES = ("parameter-server", "paces", "compression", "planning")
COMMON = ("buffers", "batchnorm", "unused", "bucket_mb", "precision", "resize_lr")
_BLOCK = re.compile(
    r"<!-- (own |common |codec )?options(?:: ([\w ]+))? -->\n.*?<!-- end -->\n", re.DOTALL
)


def fill(text: str) -> str:
    """Return a page with its tables as they follow from the declarations."""
    return _BLOCK.sub(
        lambda found: _block(found[0], found[1] or "", (found[2] or "").split()), text
    )


def covered(text: str) -> set[tuple[str, str]]:
    """Return which options of which paces, or codecs, a page has tables of."""
    found = (_chosen(sort, names.split()) for sort, names in _BLOCK.findall(text))
    return {(name, o.name) for chosen in found for name, some in chosen.items() for o in some}


def _block(block: str, sort: str, names: list[str]) -> str:
    begin = block.partition("\n")[0]
    holder = "codecs" if sort == "codec " else "paces"
    return "\n".join([begin, "", *_table(_chosen(sort, names), holder), "", "<!-- end -->", ""])


def _chosen(sort: str, names: list[str]) -> Mapping[str, Sequence[Option]]:
    """Return the options of a table, by pace or codec."""
    if sort == "codec ":
        return {name: row.options for name, row in CODECS.items()}
    if sort == "common ":
        return {name: [o for o in row.options if o.name in COMMON] for name, row in _paces()}
    if sort == "own ":
        return {name: [o for o in KNOWN[name].options if o.name not in COMMON] for name in names}
    return {name: KNOWN[name].options for name in names}


def _paces() -> Iterator[tuple[str, Pace]]:
    return ((name, row) for name, row in KNOWN.items() if not row.stands_for)


def _table(options: Mapping[str, Sequence[Option]], holder: str) -> Iterator[str]:
    """Yield a row for each name of an option; where paces differ in it, it says how."""
    found: dict[str, dict[Option, list[str]]] = {}
    for name, all_of_it in options.items():
        for option in all_of_it:
            found.setdefault(option.name, {}).setdefault(option, []).append(name)
    holders = [name for name, all_of_it in options.items() if all_of_it]
    is_of_one = len(holders) == 1
    yield (
        "| option | default | meaning |"
        if is_of_one
        else f"| option | default | {holder} | meaning |"
    )
    yield "|---|---|---|" if is_of_one else "|---|---|---|---|"
    for name, variants in found.items():
        having = [one for names in variants.values() for one in names]
        where = "all" if len(having) == len(holders) else _words(having)
        cells = [f"`{name}`", _defaults(variants), where, _meanings(variants)]
        if is_of_one:
            del cells[2]
        yield f"| {' | '.join(cells)} |"


def _defaults(variants: Mapping[Option, list[str]]) -> str:
    return _differing([(_default(option), names) for option, names in variants.items()])


def _default(option: Option) -> str:
    text = option.default_text
    if option.otherwise or text is None:
        return option.otherwise
    return text if option.default is not None else f"`{text}`"


def _meanings(variants: Mapping[Option, list[str]]) -> str:
    return _differing([(option.help, names) for option, names in variants.items()])


def _differing(found: list[tuple[str, list[str]]]) -> str:
    """Return the first text, and the others with the paces that they are about."""
    first = found[0][0]
    others = [f"{_words(names)}: {text}" for text, names in found[1:] if text != first]
    return "; ".join([first, *others])


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    for page in PAGES:
        path = GUIDES / f"{page}.md"
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
