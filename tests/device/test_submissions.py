"""The thread that runs backward submits buckets, and never waits for a copy of their gradients."""

from __future__ import annotations

from typing import Any

from paceline.pace.through_host.exchange import ThroughHost
from paceline.pace.through_host.served import DeviceServerExchange
from paceline.ps.spec import Rule
from support.devices import run_alone_on_device


class Copying:
    """A copy to the host that is not complete."""

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("the thread that runs backward waits for a copy")


class OnDevice:
    """A bucket, and the host bucket that copies it."""

    index, absent, grads = 0, (), None

    def of(self, bucket: Any) -> OnDevice:
        return self

    def fetch_step(self, step: int) -> Copying:
        return Copying()

    def fetch_gradients(self, source: Any) -> Copying:
        return Copying()


def test_submissions_do_not_wait_for_copies():
    def body() -> None:
        bucket: Any = OnDevice()
        inner: Any = None  # is not called before the copy is complete
        average = ThroughHost(inner, bucket).submit(bucket, 0)
        push = DeviceServerExchange(Rule(bound=0), None, bucket).submit(bucket, 0)
        assert not average.done() and not push.done()

    run_alone_on_device(body, schedule="lazy")
