"""Where the output of a process goes: to the display, or into its file."""

from __future__ import annotations

from paceline.launcher.processes.output import ShownOutput
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display


def sink_of(process: RankProcess, spec: RunSpec, display: Display) -> ShownOutput:
    """Return what takes the output of a process, on this machine or on another host."""
    name = process.name
    if process.output.is_file:
        return ShownOutput(process, display, None)
    if not spec.is_detached:
        return ShownOutput(process, display, lambda data: display.log(name, data))
    # The processes of a detached job write their files, but not those of other hosts.
    assert spec.log_dir is not None
    path = spec.log_dir / name.log_name

    def append(data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    return ShownOutput(process, display, append)
