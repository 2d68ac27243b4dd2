"""`paceline`: the command line.

Typer parses, this file maps errors to exit codes, and each command has its own module that is
imported when it is used, so that `paceline --version` and a typing error answer at once. torch is
never imported here.

Exit codes: 2 for a wrong command line or setting, 1 for a job that could not be set up; otherwise
what the command returns (for `run`: the script's own code).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paceline.cli import checkpoint, run_options
from paceline.cli.planning import options as planning_options
from paceline.cli.planning import run_options as measuring_options
from paceline.cli.planning.script_command import ScriptCommand
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
        from paceline.cli.doctor import paceline_version

        typer.echo(f"paceline {paceline_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version  # the callback has done its work


app.command(
    context_settings={"allow_interspersed_args": False},
    help="Run a script or module as N cooperating processes on this machine.",
    epilog="Arguments after the script name are passed to the script, even if they look like"
    " options of paceline. The script's standard input is empty.",
)(run_options.run)

_Job = Annotated[
    str | None, typer.Argument(metavar="[JOB]", help="Name of the job; default: the only one.")
]


@app.command(
    context_settings={"allow_interspersed_args": False},
    help="Run a script as one more worker of a running job.",
    epilog="Arguments after the script name are passed to the script.",
)
def join(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[JOB] SCRIPT [ARGUMENTS]...",
            help="JOB: name of the job; default: the only one.",
        ),
    ],
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")
    ] = False,
    pace: Annotated[
        str | None, typer.Option("--pace", metavar="PACE", help="Default: the pace of the job.")
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator", metavar="HOST:PORT", help="Address of a job on another host."
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file", metavar="FILE", help="Copy of the secret file of that job (mode 0600)."
        ),
    ] = None,
) -> None:
    from paceline.cli import job_commands as command
    from paceline.pace.parse import parse_schedule

    code = command.join(
        words,
        is_module=module,
        pace=None if pace is None else parse_schedule(pace),
        coordinator=coordinator,
        secret_file=secret_file,
    )
    raise typer.Exit(code)


@app.command(help="Follow a job that was started with --detach; Ctrl-C leaves it running.")
def attach(job: _Job = None) -> None:
    from paceline.cli import detach as command

    raise typer.Exit(command.attach(job))


@app.command(help="List your running jobs on this host.")
def jobs() -> None:
    from paceline.cli import job_logs as command

    raise typer.Exit(command.jobs())


@app.command(help="Print what the processes of a running job have printed.")
def logs(
    job: _Job = None,
    process: Annotated[
        list[str] | None,
        typer.Option("--process", "-p", help="Only these: 3 is rank 3, s0 server 0, d0."),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-l", help="Last lines of each.")] = 20,
) -> None:
    from paceline.cli import job_logs as command

    raise typer.Exit(command.logs(job, process or [], lines))


@app.command(help="Show the processes and the state of a running job.")
def status(job: _Job = None) -> None:
    from paceline.cli import job_commands as command

    raise typer.Exit(command.status(job))


@app.command(help="Show a live table of a running job; q or Ctrl-C leaves it running.")
def top(
    job: _Job = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
) -> None:
    from paceline.cli import top as command

    raise typer.Exit(command.top(job, once=once))


@app.command(help="Change the number of workers of a running job, within its --min and --max.")
def scale(
    job: _Job = None,
    num_workers: Annotated[
        int, typer.Option("-n", "--workers", metavar="N", help="New number of workers.")
    ] = ...,  # type: ignore[assignment]  # typer's way to make it required
) -> None:
    from paceline.cli import job_commands as command

    raise typer.Exit(command.scale(job, num_workers))


@app.command("set", help="Change a running job: `paceline set pace=local:8`, without a restart.")
def set_(
    setting: Annotated[
        str, typer.Argument(metavar="NAME=VALUE", help="pace=PACE: when workers agree.")
    ],
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Name of the job; default: the only one."),
    ] = None,
) -> None:
    from paceline.cli import job_commands as command

    raise typer.Exit(command.set_pace(job, setting))


@app.command(help="Show the servers of a running job and their load, or change their number.")
def servers(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB] [add [N] | remove K...]", help="Default: show the load."),
    ] = None,
) -> None:
    from paceline.cli import job_commands as command

    raise typer.Exit(command.servers(words or []))


@app.command(help="Show the hosts of a running job, or add or remove one.")
def hosts(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB] [add HOST[:SLOTS] | remove HOST]", help="Default: list the hosts."
        ),
    ] = None,
) -> None:
    from paceline.cli import hosts as command

    raise typer.Exit(command.hosts(words or []))


@app.command(help="End a running job, as Ctrl-C in its terminal does.")
def stop(job: _Job = None) -> None:
    from paceline.cli import job_commands as command

    raise typer.Exit(command.stop(job))


@app.command(help="Write a report about a run, with plots, as one HTML file.")
def report(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of a finished or running job.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: RUN_DIR/report.html."),
    ] = None,
) -> None:
    from paceline.observe.report.page import REPORT_FILE, render, write
    from paceline.observe.report.reading import read_run

    path = directory / REPORT_FILE if output is None else output
    write(render(read_run(directory)), path)
    typer.echo(path)


_AFTER_SCRIPT = "Other words after the script name, and all after `--`, are passed to the script."
app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    help="Measure a script and predict its step under every pace: which one, how many servers.",
    epilog=_AFTER_SCRIPT,
)(planning_options.plan)
app.command(
    help="Simulate a model on a cluster that you may not have: step times, waits, staleness,"
    " failures."
)(planning_options.simulate)
app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    help="Run a script at several paces with equal budgets: loss, speed, bytes; also as a page.",
    epilog=_AFTER_SCRIPT,
)(measuring_options.compare)
app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    help="Check that the first steps of a job equal those of one process with the global batch.",
    epilog=f"Exit code 0: equal within the tolerance; 1: not. {_AFTER_SCRIPT}",
)(measuring_options.parity)


@app.command(help="List the paces and codecs with their options, defaults and meanings.")
def paces(
    word: Annotated[
        str | None,
        typer.Argument(metavar="[PACE|CODEC]", help="Show only this one, such as ssp or topk."),
    ] = None,
) -> None:
    from paceline.cli import paces as command

    raise typer.Exit(command.paces(word))


@app.command(help="Check this machine and installation; include the output in bug reports.")
def doctor(
    run: Annotated[bool, typer.Option("--run", help="Also run a job of two processes.")] = False,
    device: Annotated[
        bool, typer.Option("--device", help="Also measure the accelerator: copies, order, overlap.")
    ] = False,
) -> None:
    from paceline.cli import doctor as command

    raise typer.Exit(command.doctor(run_self_test=run, with_device=device))


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
    """Return Typer's error as one line that points to the help of the command."""
    format_message = getattr(error, "format_message", error.__str__)
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "paceline")
    text = str(format_message()).replace("\n", " ").rstrip(". ")
    return f"{text}; see `{path} --help`" if text else f"see `{path} --help`"


def _refuse(text: str, code: int) -> int:
    print(f"paceline: error: {text}", file=sys.stderr)  # noqa: T201 - this is the command line
    return code


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the command; always ends the process."""
    sys.exit(_exit_code(arguments))
