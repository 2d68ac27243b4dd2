"""`horovodrun`: Horovod's command line, translated into `paceline run --horovod`.

The options that scripts use are translated. Options that tune Horovod's own engine are accepted and
reported as ignored.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paceline import __version__
from paceline.cli.main import main as paceline_main
from paceline.runtime.console import say

_IGNORED_VALUES = (
    *("--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity"),
    *("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample"),
    *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    *("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
    *("--mpi-args", "--binding-args", "--tcp-prefix", "--thread-affinity", "--num-nccl-streams"),
    *("--gloo-timeout-seconds", "--start-timeout", "--elastic-timeout", "--log-level"),
    *("--network-interfaces", "--nics", "--ssh-port", "-p", "--ssh-identity-file", "-i"),
    *(
        "--slots-per-host",
        "--slots",
        "--reset-limit",
        "--blacklist-cooldown-range",
        "--config-file",
    ),
)
_IGNORED_FLAGS = (
    *("--gloo", "--mpi", "--jsrun", "--autotune", "--no-autotune", "--disable-cache"),
    *("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather"),
    *("--no-hierarchical-allgather", "--no-stall-check", "--stall-check", "--mpi-threads-disable"),
    *("--no-mpi-threads-disable", "--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    *("--tcp", "--prefix-output-with-timestamp", "--log-with-timestamp", "--log-hide-timestamp"),
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the command; always ends the process."""
    given = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    if given.check_build:
        print(_build())  # noqa: T201 - this is the command line
        sys.exit(0)
    ignored = sorted({word for word in vars(given).get("ignored") or ()})
    if ignored:
        say(f"horovodrun: ignored, Paceline's engine needs no such setting: {', '.join(ignored)}")
    translated = translate(given)
    if given.verbose:
        say("horovodrun: paceline " + " ".join(translated))
    paceline_main(translated)


def translate(given: argparse.Namespace) -> list[str]:
    """Return the arguments of `paceline` for a parsed command line."""
    run = ["run", "--horovod"]
    hosts = given.hosts
    if given.host_discovery_script:
        hosts = _discovered(given.host_discovery_script)
    for option, value in (
        ("-n", given.num_proc),
        ("--min", given.min_np),
        ("--max", given.max_np),
        ("--hosts", hosts),
        ("--hostfile", given.hostfile),
        ("--log-dir", given.output_filename),
    ):
        if value is not None:
            run += [option, str(value)]
    if given.timeline_filename:
        run += ["--env", f"HOROVOD_TIMELINE={Path(given.timeline_filename).absolute()}"]
    return [*run, *_script(given.command)]


def _script(command: Sequence[str]) -> list[str]:
    """Return script and arguments of `python train.py ...`, `python -m module ...`, `train.py`."""
    words = [word for word in command if word != "--"] if command[:1] == ["--"] else list(command)
    if not words:
        _parser().error("the command is missing: horovodrun -np 2 python train.py")
    if Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            say(f"horovodrun: the interpreter's option {words[0]} is ignored")
            words = words[1:]
    return words


def _discovered(script: str) -> str:
    """Return the hosts that a discovery script prints, one `name` or `name:slots` in a line."""
    found = subprocess.run([script], capture_output=True, text=True, check=False)
    hosts = ",".join(found.stdout.split())
    if found.returncode or not hosts:
        _parser().error(
            f"--host-discovery-script {script}: exit code {found.returncode}, no hosts;"
            f" {found.stderr.strip()}"
        )
    say(f"horovodrun: {script} was called once; later hosts join with `paceline scale`")
    return hosts


class _Ignore(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        del parser, values
        namespace.ignored = [*(getattr(namespace, "ignored", None) or ()), option_string]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "horovodrun", description="Run a Horovod script on Paceline.", allow_abbrev=False
    )
    parser.add_argument("-v", "--version", action="version", version=f"Paceline {__version__}")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what is supported")
    parser.add_argument("-np", "--num-proc", type=int, help="number of processes")
    parser.add_argument("-H", "--hosts", help="hosts and their slots: a:4,b:4")
    parser.add_argument("-hostfile", "--hostfile", help="file with a line `host slots=4` each")
    parser.add_argument("--min-np", "--min-num-proc", type=int, help="elastic: fewest processes")
    parser.add_argument("--max-np", "--max-num-proc", type=int, help="elastic: most processes")
    parser.add_argument("--host-discovery-script", help="prints the hosts")
    parser.add_argument("--timeline-filename", help="write a timeline of operations")
    parser.add_argument("--output-filename", help="directory for the output of each rank")
    parser.add_argument("--verbose", action="store_true", help="show the command that is run")
    for options, takes in ((_IGNORED_VALUES, None), (_IGNORED_FLAGS, 0)):
        for option in options:
            parser.add_argument(
                option, action=_Ignore, nargs=takes, default=None, help=argparse.SUPPRESS
            )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python train.py ...")
    return parser


def _build() -> str:
    has_keras, has_tensorflow = map(importlib.util.find_spec, ("keras", "tensorflow"))
    rows = [("PyTorch", True), ("TensorFlow", has_tensorflow), ("Keras", has_keras)]
    rows += [("MXNet", None)]
    lines = [f"Paceline {__version__} with the interface of Horovod 0.28.1:", ""]
    lines += ["Available Frameworks:"]
    lines += [f"    [{'X' if has else ' '}] {name}" for name, has in rows]
    lines += ["", "Available Controllers:", "    [ ] MPI", "    [X] Paceline"]
    lines += ["", "Available Tensor Operations:", "    [ ] NCCL", "    [ ] MPI", "    [X] Paceline"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
