"""What compression saved and cost, added up and written for people."""

from __future__ import annotations

import pytest

from paceline.observe.telemetry.traffic import (
    CodecStats,
    Compression,
    CompressionMeter,
    describe_compression,
)


def test_accounts_add_up_over_codecs() -> None:
    books, accounts = CompressionMeter(), [CodecStats(), CodecStats()]
    assert books.read(3, 1.0) is None
    books.open("int8", accounts)
    accounts[0].add_sent(400, 100)
    accounts[1].add_sent(40, 10)
    accounts[1].add_error(0.5)
    later = [CodecStats()]
    books.open("topk:0.01", later)
    later[0].add_sent(100, 1)
    later[0].add_error(0.25)
    with later[0].timed():
        pass
    found = books.read(10, 2.0)
    assert found is not None and found.spent_s > 0
    assert (found.codec, found.steps, found.trained_s) == ("int8, topk:0.01", 10, 2.0)
    assert (found.plain_bytes, found.sent_bytes) == (540, 111)
    assert found.error == pytest.approx(0.375)
    assert books.read(0, 0.0) is None


def test_time_counts_also_when_something_fails() -> None:
    account = CodecStats()
    with pytest.raises(ValueError), account.timed():
        raise ValueError
    assert account.spent_s > 0


def test_one_line_for_people() -> None:
    workers = [
        Compression("int8", 10, 1e6, 2.5e5, 0.02, 1.0, 0.5),
        Compression("int8", 10, 1e6, 2.5e5, 0.04, 1.0, 0.25),
    ]
    (line,) = describe_compression(workers)
    assert line == (
        "int8: 25 kB per step instead of 100 kB (1/4), 3.0 ms per step to encode and decode (3 % of"
        " the time); 37.5 % of a gradient waits for the next step"
    )
    assert describe_compression([]) == []
    (line,) = describe_compression(
        [Compression("fp16", 1, 0.0, 0.0, 0.0)]
    )  # a worker alone sends nothing
    assert line == "fp16: 0 B per step instead of 0 B, 0.0 ms per step to encode and decode"
