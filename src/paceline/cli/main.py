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

from paceline.cli import checkpoint, run_options
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
    epilog="Everything after the script's name belongs to the script, also what looks like an"
    " option of paceline. The script's standard input is empty.",
)(run_options.run)

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
    from paceline.cli import job_commands as verb
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
    from paceline.cli import detach as verb

    raise typer.Exit(verb.attach(job))


@app.command(help="Say who is in a running job, and how it is.")
def status(job: _Job = None) -> None:
    from paceline.cli import job_commands as verb

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
    from paceline.cli import job_commands as verb

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
    from paceline.cli import job_commands as verb

    raise typer.Exit(verb.set_pace(job, setting))


@app.command(help="Show the servers of a running job and their load, or change their number.")
def servers(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB] [add [N] | remove K...]", help="Without: show the load."),
    ] = None,
) -> None:
    from paceline.cli import job_commands as verb

    raise typer.Exit(verb.servers(words or []))


@app.command(help="End a running job, as Ctrl-C in its terminal does.")
def stop(job: _Job = None) -> None:
    from paceline.cli import job_commands as verb

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
