"""Requests about hosts travel from a command to the launcher, and its answers back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.control import operator_messages as o
from paceline.control.client.operator import Operator
from paceline.control.membership.policy import Policy
from paceline.errors import ConfigError, LaunchError, PacelineError, ProtocolError, UsageError
from paceline.launcher.elastic.host_requests import NoHosts, carry_out, one_host
from paceline.launcher.hosts.host_list import HostSlots


@pytest.fixture
def connect(cluster, secret, job_id, request):
    def connect(**options) -> Operator:
        operator = Operator.connect(cluster.address, secret, job_id, **options)
        request.addfinalizer(operator.close)
        return operator

    return connect


@pytest.fixture
def elastic(cluster):
    cluster.start(1, policy=Policy(num_workers=1, is_elastic=True))


class Launcher:
    """Answers every request as launcher/elastic/host_requests.py does."""

    def __init__(self, connect, hosts) -> None:
        self.hosts, self.asked = hosts, []
        self._operator = connect(on_notification=self._on_news, is_launcher=True)

    def _on_news(self, news) -> None:
        if isinstance(news, o.HostsWanted):
            self.asked.append(news)
            # The operator's thread has a running loop of its own.
            threading.Thread(target=self._answer, args=(news,)).start()

    def _answer(self, news: o.HostsWanted) -> None:
        try:
            text, error = asyncio.run(carry_out(self.hosts, news)), ""
        except PacelineError as refused:
            text, error = str(refused), type(refused).__name__
        self._operator.answer_hosts(news.request, text, error)

    def close(self) -> None:
        self._operator.close()


class Two:
    """Hosts that can change."""

    def __init__(self) -> None:
        self.hosts = [HostSlots("a", 4), HostSlots("b", 4)]

    def host_lines(self) -> list[str]:
        return [str(host) for host in self.hosts]

    async def add_host(self, host: HostSlots) -> str:
        self.hosts.append(host)
        return f"host {host.name} is ready"

    async def remove_host(self, name: str) -> str:
        if name not in [host.name for host in self.hosts]:
            raise ConfigError(f"{name} is no host of the job")
        self.hosts = [host for host in self.hosts if host.name != name]
        return f"host {name} is removed"


def test_a_request_reaches_the_launcher_and_its_answer_the_command(elastic, connect) -> None:
    launcher, command = Launcher(connect, Two()), connect()
    assert command.change_hosts("list") == "a:4\nb:4"
    assert command.change_hosts("add", "bob@c:2") == "host c is ready"
    assert launcher.hosts.hosts[-1] == HostSlots("c", 2, "bob")
    assert command.change_hosts("remove", "b") == "host b is removed"
    assert [host.name for host in launcher.hosts.hosts] == ["a", "c"]
    with pytest.raises(ConfigError, match="x is no host of the job"):
        command.change_hosts("remove", "x")
    with pytest.raises(ConfigError, match="hosts add c:0: .* expected a number of slots"):
        command.change_hosts("add", "c:0")


def test_other_commands_that_watch_are_not_asked(elastic, connect) -> None:
    heard = []
    connect(on_notification=heard.append)
    Launcher(connect, Two())
    connect().change_hosts("list")
    assert not [news for news in heard if isinstance(news, o.HostsWanted)]


def test_a_job_without_hosts_says_so(elastic, connect) -> None:
    Launcher(connect, NoHosts())
    command = connect()
    assert "has no host list" in command.change_hosts("list")
    with pytest.raises(ConfigError, match=r"hosts add c:4: the job has no host list.*--hosts a:4"):
        command.change_hosts("add", "c:4")
    with pytest.raises(ConfigError, match="hosts remove b: the job has no host list"):
        command.change_hosts("remove", "b")


def test_a_job_without_launcher_says_so(elastic, connect) -> None:
    with pytest.raises(LaunchError, match="the launcher of this job is not connected"):
        connect().change_hosts("list")


def test_a_launcher_that_ends_before_it_answers(elastic, connect) -> None:
    def leave(news) -> None:
        if isinstance(news, o.HostsWanted):
            threading.Thread(target=launcher.close).start()

    launcher = connect(on_notification=leave, is_launcher=True)
    with pytest.raises(LaunchError, match="has ended before it answered"):
        connect().change_hosts("list")


def test_only_the_launcher_that_was_asked_can_answer(elastic, connect) -> None:
    stranger = connect()
    asked = threading.Event()

    def delay(news) -> None:
        if isinstance(news, o.HostsWanted):
            stranger.answer_hosts(news.request, "wrong")
            stranger.thread.post(asked.set)

    launcher = connect(on_notification=delay, is_launcher=True)

    def reply() -> None:
        assert asked.wait(20)
        stranger.status()  # the coordinator has read what came before
        launcher.answer_hosts(1, "right")

    thread = threading.Thread(target=reply)
    thread.start()
    assert connect().change_hosts("list") == "right"
    thread.join()
    launcher.answer_hosts(77, "to nothing")
    assert connect().status().over == ""


def test_what_cannot_be_asked(cluster, connect) -> None:
    cluster.start(1)
    with pytest.raises(UsageError, match="this job is not elastic"):
        connect().change_hosts("add", "c:4")
    with pytest.raises(ProtocolError, match="expected one of list, add, remove"):
        connect().change_hosts("burn", "c:4")


def test_one_host_at_a_time() -> None:
    assert one_host("bob@[::1]:4") == HostSlots("::1", 4, "bob")
    with pytest.raises(ConfigError, match="hosts add c:4,d:4: add one host at a time"):
        one_host("c:4,d:4")
