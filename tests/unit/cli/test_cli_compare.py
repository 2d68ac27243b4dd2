"""Wrong options of `paceline compare` and `paceline parity`: errors that say what to type."""

from __future__ import annotations

import pytest

from paceline.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--budget", "0s"], "--budget 0s: nothing is reached in no time"),
        (["compare", "--budget", "5s", "--steps", "9"], "give one of them"),
        (["compare", "--steps", "2"], "at least 3 steps"),
        (["compare", "--slow", "2:4x"], "there is no rank 2; the ranks are 0 to 1"),
        (["compare", "--slow", "1:0.5x"], "give at least 1x"),
        (["compare", "--slow", "fast"], "expected RANK:FACTORx, such as 1:4x"),
        (["compare", "--paces", "nonsense"], "there is no such pace"),
        (["compare", "--paces", "ps,ps"], "names ps twice"),
        (["compare", "--paces", "backup:2"], "leave no worker to wait for"),
        (["compare", "--paces", "hogwild", "--link", "1gbit"], "cannot be compared with --link"),
        (["compare", "--link", "0mbit"], "nothing can be sent at that rate"),
        (["compare", "--emulate", "pacing"], "--emulate pacing without --link"),
        (["compare", "--link", "1gbit", "--emulate", "tc"], "expected auto, namespaces, pacing"),
        (
            ["compare", "--link", "40gbit", "--emulate", "pacing"],
            "keep up with at most 10gbit",
        ),
        (
            ["compare", "--link", "1kbit", "--emulate", "pacing"],
            "at less than 128kbit heartbeats would be late",
        ),
        (
            ["compare", "--link", "1gbit,2s", "--emulate", "pacing"],
            "a latency of more than 1 s would pass for a lost peer",
        ),
        (["compare", "-n", "1"], "from 2 workers on"),
        (["parity", "-n", "1"], "is compared with at least 2"),
        (["parity", "--steps", "1"], "at least 3 steps"),
        (["parity", "--pace", "async"], "pace async cannot be compared with one process"),
        (["parity", "--pace", "allreduce[compress=int8]"], "without a codec"),
        (["parity", "--tolerance", "-1"], "expected a number of at least 0"),
    ],
)
def test_wrong_options_are_explained(tmp_path, capsys, words, message):
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        main([*words, str(script)])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "parity"])
def test_a_script_that_is_not_there(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "gone.py"])
    assert ended.value.code == 2 and "there is no script" in capsys.readouterr().err


def test_options_are_read_after_the_script_until_a_word_of_its_own(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")

    def errors(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(["parity", *words])
        return capsys.readouterr().err

    for own in (["-n", "1"], ["-n1"], ["--workers=1"], ["--seed", "3", "-n", "1"]):
        error = errors(str(script), *own)
        assert "-n 1: one process is compared" in error
        assert f"{' '.join(own)}: read as options of parity; the script's follow --" in error
    error = errors("--steps", "2", str(script), "--rate", "1", "-n", "1")
    assert "--steps 2" in error and "read as" not in error
    error = errors("--steps", "2", str(script), "--", "-n", "1")
    assert "--steps 2" in error and "read as" not in error


def test_links_without_the_rights_to_shape_them(tmp_path, capsys, monkeypatch):
    """The tools of the system refuse: the engine paces, or an error quotes them and the numbers."""
    for tool in ("ip", "tc", "nsenter", "unshare"):
        program = tmp_path / tool
        program.write_text("#!/bin/sh\necho not permitted >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "train.py").write_text("")

    def errors(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["compare", *words, str(tmp_path / "train.py")])
        assert ended.value.code == 2
        return capsys.readouterr().err

    refused = errors("--link", "100mbit", "--emulate", "namespaces")
    assert "--link 100mbit,50us --emulate namespaces: this process may not shape" in refused
    assert "not permitted" in refused and "kernel.unprivileged_userns_clone=1" in refused
    refused = errors("--link", "40gbit")
    assert "--link 40gbit,50us cannot be emulated by pacing in the engine" in refused
    assert "at most 10gbit" in refused and "(not permitted). Run it as root" in refused
    paced = errors("--link", "100mbit,5ms")  # the script is empty, so the job fails
    assert "pacing in the engine: 2 hosts of one worker each, 100 Mbit/s, 5 ms one way" in paced
    assert "cannot make a network namespace (not permitted)" in paced
