"""Notices that a machine goes away: what files and providers say, asked of a server on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launcher.preemption.notice import (
    PROVIDERS,
    Notice,
    NoticeSource,
    parse_duration,
    read_text,
)
from paceline.launcher.preemption.poller import NoticePoller

NOW_S = 1_505_722_800.0  # 2017-09-18T08:20:00Z


class Metadata:
    """A server that answers like a metadata service; `answers` has code and body by path."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.asked.append((self.command, self.path, headers))
                code, body = outer.answers.get(self.path, (404, ""))
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", body)
                self.end_headers()
                self.wfile.write(body.encode())

            do_PUT = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


def poller(text: str, found: list[Notice] | None = None, lines: list[str] | None = None):
    source = NoticeSource.parse(text)
    on_notice = [].append if found is None else found.append
    return NoticePoller(source, on_notice, [].append if lines is None else lines.append)


def test_aws_with_its_token(metadata: Metadata) -> None:
    looker = poller(f"aws={metadata.address}")
    metadata.answers["/latest/api/token"] = 200, "t0k"
    assert looker.look() is None, "404: no notice"
    path = PROVIDERS["aws"].path
    (first, _, asked), (_, _, later) = metadata.asked
    assert first == "PUT" and "x-aws-ec2-metadata-token-ttl-seconds" in asked
    assert later["x-aws-ec2-metadata-token"] == "t0k"
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
    metadata.answers[path] = 200, json.dumps({"action": "terminate", "time": at})
    notice = looker.look()
    assert notice is not None and notice.why == "AWS spot notice (terminate)"
    assert notice.within_s is not None and 110 < notice.within_s <= 120
    metadata.answers[path] = 401, ""  # the token has expired
    with pytest.raises(OSError, match="401"):
        looker.look()
    metadata.answers[path] = 404, ""
    assert looker.look() is None and metadata.asked[-2][0] == "PUT", "asked for another token"


def test_gcp_and_azure(metadata: Metadata) -> None:
    gcp = poller(f"gcp={metadata.address}")
    metadata.answers[PROVIDERS["gcp"].path] = 200, "FALSE"
    assert gcp.look() is None
    assert metadata.asked[-1][2]["metadata-flavor"] == "Google"
    metadata.answers[PROVIDERS["gcp"].path] = 200, "TRUE"
    assert gcp.look() == Notice("Google Cloud preempts it")
    azure = poller(f"azure={metadata.address}")
    event = {"EventType": "Preempt", "Resources": ["other"], "NotBefore": ""}
    metadata.answers[PROVIDERS["azure"].name_path] = 200, "mine"
    metadata.answers[PROVIDERS["azure"].path] = 200, json.dumps({"Events": [event]})
    assert azure.look() is None, "of another machine"
    event |= {"Resources": ["mine"], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}
    metadata.answers[PROVIDERS["azure"].path] = 200, json.dumps({"Events": [event]})
    assert azure.look() == Notice("Azure scheduled event Preempt", 0.0)


def test_files_addresses_and_what_they_say(metadata: Metadata, tmp_path: Path) -> None:
    file = tmp_path / "preempt"
    looker = poller(f"file:{file}")
    assert looker.look() is None
    file.touch()
    assert looker.look() == Notice(f"there is {file}")
    file.write_text('{"in_s": 45, "why": "rack 3"}')
    assert looker.look() == Notice("rack 3", 45.0)
    other = poller(f"{metadata.address}/x")
    metadata.answers["/x"] = 200, "going\ndown"
    assert other.look() == Notice("going")
    metadata.answers["/x"] = 302, metadata.address + "/y"
    with pytest.raises(OSError, match="302"):
        other.look()
    assert read_text('{"time": "2017-09-18T08:22:00Z"}', NOW_S) == Notice("notice", 120.0)
    for text in ('{"time": 5}', '{"time": "soon"}', '{"in_s": true}'):
        assert read_text(text, NOW_S) == Notice("notice"), text
    assert read_text("[" * 100_000, NOW_S) is not None, "any text is a notice"
    assert read_text("\x1b[31m" + "x" * 1000, NOW_S).why == " [31m".strip() + "x" * 195


def test_a_notice_is_told_once_and_its_end(tmp_path: Path) -> None:
    file, found, lines = tmp_path / "preempt", list[Notice](), list[str]()

    async def watch() -> None:
        watching = asyncio.ensure_future(poller(f"file:{file}", found, lines).watch())
        for wanted in (1, 2):
            file.write_text("soon") if wanted == 1 else file.unlink()
            while len(found) < wanted:
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(asyncio.wait_for(watch(), 20))
    assert found == [Notice("soon"), Notice("soon", is_withdrawn=True)] and not lines


def test_a_source_that_does_not_answer_is_reported_once() -> None:
    lines: list[str] = []

    async def watch() -> None:
        watching = asyncio.ensure_future(poller("http://127.0.0.1:9/x", lines=lines).watch())
        await asyncio.sleep(2.5)
        watching.cancel()

    asyncio.run(watch())
    assert len(lines) == 1 and "asking again" in lines[0]


@pytest.mark.parametrize(
    "text", ["", "ec2", "file:relative", "ftp://x/y", "aws=nothing", "http:// x"]
)
def test_wrong_sources_say_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match="--preemption-notice .* expected"):
        NoticeSource.parse(text)


def test_deadlines() -> None:
    found = [parse_duration(text, "--x") for text in ("30", "30s", "2m", "1.5min", "1 h")]
    assert found == [30, 30, 120, 90, 3600]
    for text in ("", "soon", "0", "-3", "2d", "1e3", "25h"):
        with pytest.raises(ConfigError, match="--x .* 30s"):
            parse_duration(text, "--x")
