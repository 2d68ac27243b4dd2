"""The options of `simulate` and `plan`. Their modules do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PACES = "allreduce,ps,ssp:3,async,local:8,diloco:50"


def simulate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.JSON", help="Profile of a model; `paceline plan` can save one."
        ),
    ],
    workers: Annotated[int, typer.Option("--workers", "-n", help="Up to 100000.")] = 8,
    link: Annotated[
        str, typer.Option("--link", help="Rate and latency between hosts: 25gbit,50us.")
    ] = "10gbit,50us",
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="Hosts and links instead.")
    ] = None,
    per_host: Annotated[int, typer.Option("--per-host", help="Workers on each host.")] = 1,
    cores: Annotated[
        int, typer.Option("--cores", help="Cores of each host; default: 4 for each worker.")
    ] = 0,
    servers: Annotated[
        int,
        typer.Option(
            "--servers", "-s", help="On hosts of their own; default: one beside each worker."
        ),
    ] = 0,
    paces: Annotated[
        str, typer.Option("--paces", "--pace", metavar="PACE,...", help=f"Default: {PACES}.")
    ] = PACES,
    steps: Annotated[int, typer.Option("--steps", help="Steps to simulate.")] = 200,
    straggler: Annotated[
        str | None,
        typer.Option(
            "--straggler",
            help="3x2%: any step takes 3 x as long with 2 % probability; 3x1: one worker always.",
        ),
    ] = None,
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", help="Mean time between failures of the whole job, such as 6h."),
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option("--checkpoint-every", help="Default: sqrt(2 x cost x MTBF)."),
    ] = None,
    checkpoint_cost: Annotated[
        str, typer.Option("--checkpoint-cost", help="How long one stops training.")
    ] = "2s",
    restart: Annotated[
        str, typer.Option("--restart", help="From a failure to the next step.")
    ] = "60s",
    elastic: Annotated[
        bool, typer.Option("--elastic", help="A failure costs one repeated step, no restart.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the random delays and failures.")] = 0,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            help="workers=8,64,512, bandwidth=1gbit,10gbit, per-host=1,8; or several of them.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write all as CSV.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the sweep as SVG.")
    ] = None,
) -> None:
    from paceline.cli.planning.simulate import SimulateOptions, run_simulation

    options = SimulateOptions(
        model, workers, link, cluster, per_host, cores, servers, paces, steps, straggler, mtbf,
        checkpoint_every, checkpoint_cost, restart, elastic, seed, tuple(sweeps or ()), output,
        plot,
    )  # fmt: skip
    raise typer.Exit(run_simulation(options))


def plan(
    script: Annotated[str, typer.Argument(help="The script to measure, as for `paceline run`.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed to the script.")] = None,
    num_workers: Annotated[
        int | None,
        typer.Option("-n", "--workers", metavar="N", help="Workers here; default: the cores."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts", metavar="HOST[:SLOTS],...", help="These hosts; their links are measured."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="Hosts and links from a file."),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")
    ] = False,
    paces: Annotated[
        str | None,
        typer.Option("--paces", metavar="PACE,...", help="Only these; default: all families."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="A saved profile instead of measuring."),
    ] = None,
    save_profile: Annotated[
        Path | None,
        typer.Option("--save-profile", metavar="FILE", help="Write the profile, for simulate."),
    ] = None,
    max_wire: Annotated[
        str | None,
        typer.Option(
            "--max-wire", metavar="RATE", help="Only what sends at most this, such as 200mbit."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps to measure.")] = 12,
    apply: Annotated[
        bool, typer.Option("--apply", help="Run the recommendation; compare with the prediction.")
    ] = False,
    shows_all: Annotated[bool, typer.Option("--all", help="Print every candidate.")] = False,
) -> None:
    from paceline.cli.planning.plan import PlanOptions, plan_job

    options = PlanOptions(
        script, tuple(arguments or ()), module, num_workers, hosts, cluster, paces, profile,
        save_profile, max_wire, steps, apply, shows_all,
    )  # fmt: skip
    raise typer.Exit(plan_job(options))
