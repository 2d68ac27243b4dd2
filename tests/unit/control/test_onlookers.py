"""Those who only watch a job: they hear what happens, and cannot hold it up."""

from __future__ import annotations

import threading

from paceline.control import operator_messages as o
from paceline.control.client.operator import Operator
from paceline.observe.telemetry.events import ProgressReport

_LONG = "x" * 10_000


def _steps(news: list[o.Notification]) -> list[int]:
    events = [one.event for one in list(news) if isinstance(one, o.Happened)]
    return [event.step for event in events if isinstance(event, ProgressReport)]


def test_an_onlooker_of_a_plain_job_hears_what_members_report(
    cluster, make_member, secret, job_id, eventually
) -> None:
    cluster.start(1)
    agent = cluster.agent(0)
    news: list[o.Notification] = []
    onlooker = Operator.connect(cluster.address, secret, job_id, on_notification=news.append)
    try:
        assert onlooker.status().membership is None, "it may come before the members do"
        agent.join(make_member(0), 10)
        agent.report(ProgressReport(0, 7, {"loss": 0.5}))
        eventually(lambda: _steps(news) == [7])
        assert onlooker.status().membership.ranks == (0,)
    finally:
        onlooker.close()
    agent.report(ProgressReport(0, 8))
    assert agent.store_add("counter", 1) == 1, "nobody misses an onlooker that left"


def test_an_onlooker_that_does_not_read_holds_nobody_up(
    cluster, make_member, secret, job_id, eventually
) -> None:
    cluster.start(1)
    agent = cluster.agent(0)
    agent.join(make_member(0), 10)
    is_held, news, heard = threading.Event(), list[o.Notification](), list[o.Notification]()

    def hold(one: o.Notification) -> None:
        is_held.wait()
        news.append(one)

    sleepy = Operator.connect(cluster.address, secret, job_id, on_notification=hold)
    launcher = Operator.connect(
        cluster.address, secret, job_id, on_notification=heard.append, is_launcher=True
    )
    try:
        for step in range(3000):  # 30 MB
            agent.report(ProgressReport(0, step, {_LONG: 1.0}))
            if step % 100 == 0:
                assert agent.store_add("counter", 1) == step // 100 + 1
        eventually(lambda: len(_steps(heard)) == 3000)
        backlogs = [one.channel.backlog_bytes for one in cluster.coordinator._operators._operators]
        assert max(backlogs) < 2 << 20, "what it does not read is not kept for it"
        is_held.set()
        eventually(lambda: cluster.coordinator is not None and not any(
            one.channel.backlog_bytes for one in cluster.coordinator._operators._operators
        ))  # fmt: skip
        agent.report(ProgressReport(0, 5000))
        eventually(lambda: 5000 in _steps(news))
        assert 0 < len(_steps(news)) < 3000, "it went without some"
    finally:
        is_held.set()
        sleepy.close()
        launcher.close()
