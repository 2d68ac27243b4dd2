"""`paceline checkpoint ls|show|verify|export`: the command line of these verbs.

What they do is in `saved`, which is imported when one is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="List, show, verify and export checkpoints.",
    rich_markup_mode=None,
)
_Either = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, or a directory: its newest one.")
]


@app.command(help="List the checkpoints in a directory, newest first.")
def ls(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="As given to pl.Checkpoint.")],
) -> None:
    from paceline.cli import checkpoint_commands as verb

    raise typer.Exit(verb.ls(directory))


@app.command(help="Show what is in a checkpoint: its manifest and its tensors.")
def show(path: _Either) -> None:
    from paceline.cli import checkpoint_commands as verb

    raise typer.Exit(verb.show(path))


@app.command(
    help="Read every byte of a checkpoint and compare the hashes.",
    epilog="Exit code 0: valid; 1: damaged, missing, unsafe or of a newer format.",
)
def verify(
    path: _Either,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints in the directory.")] = False,
) -> None:
    from paceline.cli import checkpoint_commands as verb

    raise typer.Exit(verb.verify(path, every=every))


@app.command(help="Write the model as a plain state_dict, for inference without Paceline.")
def export(
    path: _Either,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="FILE.safetensors or FILE.pt."),
    ],
    model: Annotated[
        int, typer.Option("--model", metavar="N", help="Which, when it has several.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE when it exists.")] = False,
) -> None:
    from paceline.cli import checkpoint_commands as verb

    raise typer.Exit(verb.export(path, output, model=model, force=force))
