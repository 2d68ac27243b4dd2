"""The options of the commands that run the script: `parity`. Their modules do the work."""

from __future__ import annotations

from typing import Annotated

import typer

_Script = Annotated[str, typer.Argument(help="The script, as for `paceline run`.")]
_Arguments = Annotated[list[str] | None, typer.Argument(help="Passed to the script.")]
_Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")]
_Seed = Annotated[
    int, typer.Option("--seed", help="Of the generators of each process at its start.")
]


def parity(
    script: _Script,
    arguments: _Arguments = None,
    num_workers: Annotated[
        int, typer.Option("-n", "--workers", metavar="N", help="Workers of the job.")
    ] = 2,
    module: _Module = False,
    steps: Annotated[int, typer.Option("--steps", help="Steps to compare.")] = 5,
    pace: Annotated[
        str | None,
        typer.Option("--pace", metavar="PACE", help="allreduce or ps; default: the script's."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", help="Relative difference of a tensor that counts as equal."),
    ] = 1e-4,
    seed: _Seed = 0,
) -> None:
    from paceline.cli.planning.parity import ParityOptions, check_parity

    options = ParityOptions(
        script, tuple(arguments or ()), module, num_workers, steps, pace, tolerance, seed
    )
    raise typer.Exit(check_parity(options))
