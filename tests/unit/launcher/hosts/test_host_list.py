"""Host lists: what --hosts and a host file mean, and one clear error for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launcher.hosts.host_list import (
    HostSlots,
    parse_host_names,
    parse_hosts,
    read_hostfile,
    require_host,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:4", [HostSlots("a", 4), HostSlots("b", 4)]),
        ("a", [HostSlots("a", 1)]),
        (" a:2 , b ", [HostSlots("a", 2), HostSlots("b", 1)]),
        ("bob@node-1.example.org:8", [HostSlots("node-1.example.org", 8, "bob")]),
        ("bob@corp.example@b", [HostSlots("b", 1, "bob@corp.example")]),
        ("10.0.0.1:2,[fe80::1]:4", [HostSlots("10.0.0.1", 2), HostSlots("fe80::1", 4)]),
        ("[fe80::1%eth0]", [HostSlots("fe80::1%eth0", 1)]),
        ("root@[::1]:3", [HostSlots("::1", 3, "root")]),
    ],
)
def test_hosts_are_read_as_they_are_written(text: str, hosts: list[HostSlots]):
    assert parse_hosts(text) == tuple(hosts)
    assert parse_hosts(",".join(map(str, hosts))) == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a host is missing"),
        ("a:4,,b:4", "a host is missing; write hosts with commas"),
        ("a:4,b:4,", "a host is missing"),
        ("a:0", "from 1 to 1024, for example 4; leave out a host that is to run nothing"),
        ("a:x", "expected a number of slots"),
        ("a:-1", "expected a number of slots"),
        ("a:5000", "from 1 to 1024"),
        ("a:", "the slots after the colon is missing; write a:4"),
        ("a:4:2222", "two numbers; write the port into a host file (a:PORT slots=N"),
        ("a:4,b:1,a:2", "host a is there twice; write it once with all its slots (a:6)"),
        ("a:4,bob@A:4", "is there twice"),
        ("a b:4", "'a b' is no name of a host"),
        ("-oProxyCommand=x", "is no name of a host"),
        ("-x@a", "'-x' is no name of a user"),
        ("@a", "'' is no name of a user"),
        ("a;rm", "is no name of a host"),
        ("$(id)", "is no name of a host"),
        ("fe80::1", "write an IPv6 address in brackets: [fe80::1]"),
        ("[fe80::1", "is no name of a host"),
        ("[a]:4", "'a' in brackets is no IPv6 address"),
        ("[::1]4", "expected the slots after it, as [::1]:4"),
        ("[::1]:", "expected the slots after it"),
        ("[fe80::1%e;x]", "is no IPv6 address"),
        ("h\u00f6st", "is no name of a host"),
        ("a\n:4", "is no name of a host"),
    ],
)
def test_a_wrong_list_says_what_to_type(text: str, words: str):
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)
    assert str(caught.value).startswith("--hosts ")
    assert words in str(caught.value)


def test_a_host_file_has_a_host_in_each_line(tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text(
        "\ufeff# the cluster\n\na slots=4\nb # the slow one\n"
        "bob@c:2222 slots=2\r\n\t[::1]:2222\tslots=2  # IPv6\n[fe80::2]\n"
    )
    assert read_hostfile(path) == (
        HostSlots("a", 4),
        HostSlots("b", 1),
        HostSlots("c", 2, "bob", 2222),
        HostSlots("::1", 2, "", 2222),
        HostSlots("fe80::2", 1),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("b slot=4", "'slot=4' is not known here; write `b slots=4`"),
        ("b 4", "'4' is not known here"),
        ("b slots=0", "from 1 to 1024"),
        ("b slots=", "expected a number of slots"),
        ("b slots = 4", "'slots' is not known here"),
        ("b slots=2 slots=2", "slots= is there twice"),
        ("b slots=2 max_slots=4", "'max_slots=4' is not known here"),
        ("b:4", "the number after the colon is the port of sshd; write `b slots=4`, or `b:4 slots"),
        ("b:0 slots=1", "port '0': expected a number from 1 to 65535"),
        ("b:ssh slots=1", "port 'ssh'"),
        ("a slots=2", "host a is there twice"),
        ("\u4e3b\u673a slots=2", "is no name of a host"),
    ],
)
def test_an_error_in_a_host_file_names_the_line(tmp_path: Path, line: str, words: str):
    path = tmp_path / "hosts"
    path.write_text(f"# two hosts\na slots=4\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert str(caught.value).startswith(f"--hostfile {path}, line 4: ")
    assert words in str(caught.value)


def test_a_file_that_is_no_host_file_is_refused(tmp_path: Path):
    empty, binary, large = tmp_path / "empty", tmp_path / "binary", tmp_path / "large"
    empty.write_text("# nothing\n\n")
    binary.write_bytes(b"\x7fELF\0\0")
    large.write_text("a\n" * 600_000)
    for path, words in (
        (empty, "names no host"),
        (binary, "is no host file"),
        (large, "is no host file"),
        (tmp_path / "missing", "No such file or directory; name a readable file"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_hostfile(path)


def test_names_of_hosts_must_be_in_the_list():
    hosts = parse_hosts("a:4,b:4,[::1]")
    assert parse_host_names("a, b,[::1]", "--servers-on") == ("a", "b", "::1")
    require_host(("a", "::1"), hosts, "--servers-on")
    with pytest.raises(
        ConfigError, match=r"'c' is not in the list of hosts; the job has a, b, ::1"
    ):
        require_host(("a", "c"), hosts, "--servers-on")
    with pytest.raises(ConfigError, match="a is there twice"):
        require_host(("a", "a"), hosts, "--servers-on")
    with pytest.raises(ConfigError, match="expected names of hosts"):
        parse_host_names("a,,b", "--servers-on")
