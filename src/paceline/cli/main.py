"""`paceline`: the command line.

Typer parses, this file maps errors to exit codes, and each verb lives in its own module that is
imported when it is used, so that `paceline --version` and a typing error answer at once. torch is
never imported here.

Exit codes: 2 for a wrong command line or setting, 1 for a job that could not be set up; otherwise
what the verb returns (for `run`: the script's own code).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paceline.cli import checkpoint
from paceline.errors import PacelineError, UsageError

app = typer.Typer(
    name="paceline",
    help="Train PyTorch models across processes and machines at the pace you choose.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(checkpoint.app, name="checkpoint")
# Typer re-exports its usage errors but not their common base, which is the second parent.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def _version(wanted: bool) -> None:
    if wanted:
        from paceline.cli.versions import paceline_version

        typer.echo(f"paceline {paceline_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version  # the callback has done its work


@app.command(
    context_settings={"allow_interspersed_args": False},
    help="Run a script or module as N cooperating processes on this machine.",
    epilog="Everything after the script's name belongs to the script, also what looks like an"
    " option of paceline. The script's standard input is empty.",
)
def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file; a module with -m.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The script's own.")
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            "-n", "--workers", metavar="N", help="How many processes; default: the mesh's, or 1."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT names a module.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads-per-worker", metavar="K", help="OMP_NUM_THREADS; default: cores / N."
        ),
    ] = None,
    servers: Annotated[
        str,
        typer.Option(
            "-s",
            "--servers",
            metavar="N|colocated",
            help="How many parameter servers; colocated: one beside each worker.",
        ),
    ] = "0",
    data_workers: Annotated[
        str,
        typer.Option(
            "--data-workers",
            metavar="N[,N...]",
            help="How many processes make batches for pl.shard(..., mode='pipeline'); several"
            " numbers: for stages in a row.",
        ),
    ] = "0",
    server_threads: Annotated[
        int | None,
        typer.Option(
            "--threads-per-server", metavar="K", help="Threads for large updates; default: 2."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", metavar="R", help="Servers that hold each value; default: 1."),
    ] = None,
    max_servers: Annotated[
        int | None,
        typer.Option(
            "--max-servers", metavar="M", help="How many `paceline servers add` may make of them."
        ),
    ] = None,
    min_workers: Annotated[
        int | None,
        typer.Option("--min", metavar="N", help="Go on after losses with so many."),
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option("--max", metavar="N", help="How many `paceline scale` or `join` may make."),
    ] = None,
    on_loss: Annotated[
        str | None,
        typer.Option(
            "--on-loss",
            metavar="shrink|replace",
            help="Of a worker: go on without it (and let another one join later), or hold the step"
            " until another has taken its place; default: shrink.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            metavar="N",
            help="When too few are left to go on, start all again, at most N times; the script goes"
            " on from its last checkpoint. Default: 0.",
        ),
    ] = None,
    pace: Annotated[
        str | None,
        typer.Option(
            "--pace",
            metavar="PACE",
            help="How the workers agree, such as allreduce, 'allreduce[update=sharded]', or with"
            " servers ps, async, ssp:3; also a schedule, 'allreduce@0, local:8@500'; wins over the"
            " script's own. `paceline paces` lists them with their options.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="fp32|bf16|fp16",
            help="In which the models compute; parameters stay float32. Wins over the script's"
            " own.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXIS=N[,...]",
            help="How the processes share out data (dp) and model (pp stages, fsdp shards, tp"
            " slices), such as dp=2,tp=2; wins over the script's own.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FIRST:STOP",
            help="Write trace.json, for Perfetto, of these steps of all processes: 20:30 are steps"
            " 20 to 29. Also PACELINE_TRACE.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Set for every process; repeatable."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            metavar="DIR",
            help="Keep the run in DIR: output, events, TensorBoard; default: runs/<date>-<script>,"
            " none: keep nothing. Also PACELINE_LOG_DIR.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            help="Serve metrics for Prometheus at 127.0.0.1:PORT; 0: any free port.",
        ),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", metavar="S", help="Seconds from SIGTERM to SIGKILL; default: 3."),
    ] = 3.0,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Run in the background; see `paceline attach`."),
    ] = False,
    no_template: Annotated[
        bool,
        typer.Option(
            "--no-template",
            help="Start each process as a fresh interpreter, instead of forking it from one that"
            " has imported torch. Also PACELINE_TEMPLATE=off.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, and stop.")
    ] = False,
) -> None:
    from paceline.cli import run as verb
    from paceline.launcher.data_workers import parse_data_workers
    from paceline.launcher.elastic.plan import plan_changes
    from paceline.launcher.servers import plan_servers
    from paceline.launcher.spec import RunSpec, parse_env
    from paceline.mesh import Mesh
    from paceline.pace.schedule import parse_schedule
    from paceline.telemetry.trace import TracedSteps

    grid = None if mesh is None else Mesh.parse(mesh)
    if num_workers is None:
        num_workers = 1 if grid is None else grid.num_workers
    planned = plan_servers(
        servers, num_workers=num_workers, replicas=replicas, threads=server_threads
    )
    spec = RunSpec(
        target=script,
        arguments=tuple(arguments or ()),
        is_module=module,
        num_workers=num_workers,
        threads_per_worker=threads,
        servers=planned,
        data_workers=parse_data_workers(data_workers),
        pace=None if pace is None else parse_schedule(pace),
        precision=precision,
        mesh=grid,
        trace=None if trace is None else TracedSteps.parse(trace),
        env=parse_env(env or ()),
        log_dir=log_dir,
        metrics_port=metrics_port,
        elastic=plan_changes(
            num_workers=num_workers,
            servers=planned,
            min_workers=min_workers,
            max_workers=max_workers,
            max_servers=max_servers,
            on_loss=on_loss,
            restarts=restarts,
            mesh=grid,
            is_detached=detach,
        ),
        grace_s=grace_s,
        is_detached=detach,
        has_template=not no_template,
        given=_given(context),
    )
    raise typer.Exit(verb.dry_run(spec) if dry_run else verb.run(spec))


def _given(context: typer.Context) -> frozenset[str]:
    """Name the parameters that somebody typed; the others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        name for name, source in sources.items() if source and source.name != "DEFAULT"
    )


_Job = Annotated[
    str | None, typer.Argument(metavar="[JOB]", help="Its name; default: the only one.")
]


@app.command(
    context_settings={"allow_interspersed_args": False},
    help="Run a script as one more worker of a job that is under way.",
    epilog="Everything after the script's name belongs to the script.",
)
def join(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[JOB] SCRIPT [ARGUMENTS]...", help="JOB: default the only one."),
    ],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT names a module.")] = False,
    pace: Annotated[
        str | None, typer.Option("--pace", metavar="PACE", help="Default: as the job's.")
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option("--coordinator", metavar="HOST:PORT", help="Of a job on another host."),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret-file", metavar="FILE", help="A copy of that job's (mode 0600)."),
    ] = None,
) -> None:
    from paceline.cli import join as verb
    from paceline.pace.schedule import parse_schedule

    code = verb.join(
        words,
        is_module=module,
        pace=None if pace is None else parse_schedule(pace),
        coordinator=coordinator,
        secret_file=secret_file,
    )
    raise typer.Exit(code)


@app.command(help="Follow a job that was started with --detach; Ctrl-C leaves it running.")
def attach(job: _Job = None) -> None:
    from paceline.cli import background as verb

    raise typer.Exit(verb.attach(job))


@app.command(help="Say who is in a running job, and how it is.")
def status(job: _Job = None) -> None:
    from paceline.cli import steering as verb

    raise typer.Exit(verb.status(job))


@app.command(help="Show a running job as a live table; q or Ctrl-C leaves, the job goes on.")
def top(
    job: _Job = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table, and stop.")] = False,
) -> None:
    from paceline.cli import top as verb

    raise typer.Exit(verb.top(job, once=once))


@app.command(help="Change the number of workers of a running job, within its --min and --max.")
def scale(
    job: _Job = None,
    num_workers: Annotated[
        int, typer.Option("-n", "--workers", metavar="N", help="How many from now on.")
    ] = ...,  # type: ignore[assignment]  # typer's way to say that it must be given
) -> None:
    from paceline.cli import steering as verb

    raise typer.Exit(verb.scale(job, num_workers))


@app.command("set", help="Change a running job: `paceline set pace=local:8`, without a restart.")
def set_(
    setting: Annotated[
        str, typer.Argument(metavar="NAME=VALUE", help="pace=PACE: how workers agree from now on.")
    ],
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="Its name; default: the only one.")
    ] = None,
) -> None:
    from paceline.cli import steering as verb

    raise typer.Exit(verb.set_pace(job, setting))


@app.command(help="Show the servers of a running job and their load, or change their number.")
def servers(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB] [add [N] | remove K...]", help="Without: show the load."),
    ] = None,
) -> None:
    from paceline.cli import steering as verb

    raise typer.Exit(verb.servers(words or []))


@app.command(help="End a running job, as Ctrl-C in its terminal does.")
def stop(job: _Job = None) -> None:
    from paceline.cli import steering as verb

    raise typer.Exit(verb.stop(job))


@app.command(help="Make a page about a run, with plots: one HTML file that needs nothing else.")
def report(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Of a run that is over, or still going on.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: RUN_DIR/report.html."),
    ] = None,
) -> None:
    from paceline.cli import report as verb

    raise typer.Exit(verb.report(directory, output))


@app.command(help="List the paces and codecs, each with its options, their defaults and meaning.")
def paces(
    word: Annotated[
        str | None,
        typer.Argument(metavar="[PACE|CODEC]", help="One of them, such as ssp or topk."),
    ] = None,
) -> None:
    from paceline.cli import paces as verb

    raise typer.Exit(verb.paces(word))


@app.command(help="Report on this machine and installation; paste it into a bug report.")
def doctor(
    run: Annotated[
        bool, typer.Option("--run", help="Also run a real two-process job on the engine.")
    ] = False,
) -> None:
    from paceline.cli import doctor as verb

    raise typer.Exit(verb.doctor(run_self_test=run))


def _exit_code(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=given or ["--help"], prog_name="paceline", standalone_mode=False)
    except typer.Exit as request:
        return request.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except _CommandLineError as error:
        return _refuse(_one_line(error), 2)
    except UsageError as error:
        return _refuse(str(error), 2)
    except PacelineError as error:
        return _refuse(f"{type(error).__name__}: {error}", 1)
    return code if isinstance(code, int) else 0


def _one_line(error: Exception) -> str:
    """Shorten Typer's complaint to one line, with a pointer to the help of the verb in question."""
    format_message = getattr(error, "format_message", error.__str__)
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "paceline")
    text = str(format_message()).replace("\n", " ").rstrip(". ")
    return f"{text}; see `{command} --help`" if text else f"see `{command} --help`"


def _refuse(text: str, code: int) -> int:
    print(f"paceline: error: {text}", file=sys.stderr)  # noqa: T201 - this is the command line
    return code


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the command; always ends the process."""
    sys.exit(_exit_code(arguments))
