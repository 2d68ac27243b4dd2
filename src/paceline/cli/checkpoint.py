"""`paceline checkpoint ls|show|verify|export`: the options of these commands.

checkpoint_commands.py, which is imported when one is used, runs them.
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
    Path,
    typer.Argument(metavar="PATH", help="A checkpoint, or a directory whose newest one is used."),
]


@app.command(help="List the checkpoints in a directory, newest first.")
def ls(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of pl.Checkpoint.")
    ],
) -> None:
    from paceline.cli import checkpoint_commands as command

    raise typer.Exit(command.ls(directory))


@app.command(help="Show what is in a checkpoint: its manifest and its tensors.")
def show(path: _Either) -> None:
    from paceline.cli import checkpoint_commands as command

    raise typer.Exit(command.show(path))


@app.command(
    help="Read every byte of a checkpoint and compare the hashes.",
    epilog="Exit code 0: valid; 1: damaged, missing, unsafe or of a newer format.",
)
def verify(
    path: _Either,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all checkpoints in the directory.")
    ] = False,
) -> None:
    from paceline.cli import checkpoint_commands as command

    raise typer.Exit(command.verify(path, every=every))


@app.command(help="Write the model as a plain state_dict, for inference without Paceline.")
def export(
    path: _Either,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="FILE.safetensors or FILE.pt."),
    ],
    model: Annotated[
        int, typer.Option("--model", metavar="N", help="Which model, if there are several.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    from paceline.cli import checkpoint_commands as command

    raise typer.Exit(command.export(path, output, model=model, force=force))
