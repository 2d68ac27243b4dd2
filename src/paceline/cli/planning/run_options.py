"""The options of `compare` and `parity`, which run the script. Their modules do the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

PACES = "allreduce,ps,ssp:3,async,diloco:50"
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


def compare(
    script: _Script,
    arguments: _Arguments = None,
    paces: Annotated[
        str, typer.Option("--paces", metavar="PACE,...", help=f"Default: {PACES}.")
    ] = PACES,
    num_workers: Annotated[
        int, typer.Option("-n", "--workers", metavar="N", help="Workers of each job.")
    ] = 2,
    servers: Annotated[
        str | None,
        typer.Option(
            "-s",
            "--servers",
            metavar="N|colocated",
            help="For paces that need them; default: one for four workers, with --link colocated.",
        ),
    ] = None,
    module: _Module = False,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Time of each pace from its first step on; default: 60s."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Steps of each worker instead of a time.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link", metavar="RATE[,LATENCY]", help="Links between the workers, such as 100mbit."
        ),
    ] = None,
    emulate: Annotated[
        str,
        typer.Option(
            "--emulate",
            metavar="ROUTE",
            help="Of --link: namespaces (needs rights), pacing in the engine, or auto.",
        ),
    ] = "auto",
    slow: Annotated[
        str | None,
        typer.Option(
            "--slow", metavar="RANK:FACTORx,...", help="1:4x: rank 1 computes 4 x slower."
        ),
    ] = None,
    value: Annotated[
        str | None,
        typer.Option(
            "--value",
            metavar="NAME",
            help="A value of pl.report instead of the loss of backward().",
        ),
    ] = None,
    seed: _Seed = 0,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="DIR", help="For compare.html and compare.svg."),
    ] = Path(),
) -> None:
    from paceline.cli.planning.compare import CompareOptions, compare_paces

    options = CompareOptions(
        script, tuple(arguments or ()), module, paces, num_workers, servers, budget, steps, link,
        emulate, slow, value, seed, output, tuple(sys.argv[1:]),
    )  # fmt: skip
    raise typer.Exit(compare_paces(options))
