"""A notice that a host goes away, and the sources of such notices: a file, or an HTTP address.

    file:/run/preempt         there is a notice while the file exists
    http://127.0.0.1:8080/x   there is a notice while the answer is 200 with a body
    aws, gcp, azure           the metadata address of the provider; aws=http://... is another one

A file and a body may say more: `{"in_s": 30, "why": "spot"}`, `{"time": "2026-05-01T08:22:00Z"}`,
or one line that says why. Nothing is asked unless the user names a source: no address is contacted
by default.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError

DEFAULT_S = 30.0  # without another deadline: what most clouds and schedulers give
SHORTEST_S, LONGEST_S = 1.0, 86400.0
MAX_BYTES = 1 << 16  # of a file or an answer
_MAX_WHY = 200
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Notice:
    """A host goes away in `within_s` seconds; None: as long as such notices usually give."""

    why: str
    within_s: float | None = None
    is_withdrawn: bool = False  # it stays after all
    is_for_job: bool = False  # a signal that a scheduler sends to all hosts of a job that it ends


@dataclass(frozen=True)
class Provider:
    """Where a cloud answers whether it takes this machine away, and how to read the answer."""

    address: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    # A token that is asked for first: path, header of the request, header of later requests.
    token: tuple[str, Mapping[str, str], str] | None = None
    name_path: str = ""  # where it tells the name of this machine
    read: Callable[[str, float, str], Notice | None] = lambda body, now_s, name: None  # noqa: ARG005


def read_text(text: str, now_s: float, name: str = "") -> Notice | None:
    """Return the notice in a file or a body; None if it is empty."""
    del name
    text = text.strip()
    if not text:
        return None
    found = _json(text)
    if not isinstance(found, dict):
        return Notice(_clean(text.splitlines()[0]))
    why = _clean(str(found.get("why") or found.get("action") or "notice"))
    seconds = found.get("in_s")
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool):
        return Notice(why, float(seconds))
    return Notice(why, _seconds_until(found.get("time"), now_s))


def _read_aws(body: str, now_s: float, name: str) -> Notice | None:
    """Read instance-action, {"action": "terminate", "time": "2017-09-18T08:22:00Z"}."""
    notice = read_text(body, now_s, name)
    return notice and Notice(f"AWS spot notice ({notice.why})", notice.within_s)


def _read_gcp(body: str, now_s: float, name: str) -> Notice | None:
    del now_s, name
    return Notice("Google Cloud preempts it") if body.strip().upper() == "TRUE" else None


def _read_azure(body: str, now_s: float, name: str) -> Notice | None:
    """Read scheduled events; those of other machines of the set are in the answer, too."""
    found = _json(body)
    for event in found.get("Events", ()) if isinstance(found, dict) else ():
        if not isinstance(event, dict) or event.get("EventType") not in ("Preempt", "Terminate"):
            continue
        resources = event.get("Resources") or ()
        if name and isinstance(resources, list) and name not in resources:
            continue
        within_s = _seconds_until(event.get("NotBefore"), now_s)
        return Notice(f"Azure scheduled event {event['EventType']}", within_s)
    return None


PROVIDERS: Mapping[str, Provider] = {
    "aws": Provider(
        address="http://169.254.169.254",
        path="/latest/meta-data/spot/instance-action",
        token=(
            "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
            "X-aws-ec2-metadata-token",
        ),
        read=_read_aws,
    ),
    "gcp": Provider(
        address="http://metadata.google.internal",
        path="/computeMetadata/v1/instance/preempted",
        headers={"Metadata-Flavor": "Google"},
        read=_read_gcp,
    ),
    "azure": Provider(
        address="http://169.254.169.254",
        path="/metadata/scheduledevents?api-version=2020-07-01",
        headers={"Metadata": "true"},
        name_path="/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        read=_read_azure,
    ),
}


@dataclass(frozen=True)
class NoticeSource:
    """What to look at: a file, or an address with the way to read its answers."""

    text: str  # as the user wrote it
    path: str = ""
    address: str = ""
    provider: Provider | None = None

    @classmethod
    def parse(cls, text: str) -> NoticeSource:
        """Read the value of --preemption-notice; raises ConfigError."""
        kind, _, rest = text.partition("=")
        if kind in PROVIDERS:
            provider = PROVIDERS[kind]
            address = rest or provider.address
            _require_http(text, address)
            return cls(text, address=address.rstrip("/"), provider=provider)
        if text.startswith("file:"):
            path = text.removeprefix("file:")
            if not path.startswith("/"):
                raise ConfigError(
                    f"--preemption-notice {text[:80]!r}: expected the full path of a file on each"
                    " host, for example file:/run/preempt"
                )
            return cls(text, path=path)
        _require_http(text, text)
        return cls(text, address=text)


def _require_http(text: str, address: str) -> None:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", address):
        raise ConfigError(
            f"--preemption-notice {text[:80]!r}: expected file:/path, http://host/path, or one of"
            f" {', '.join(PROVIDERS)}"
        )


def parse_duration(text: str, option: str) -> float:
    """Return "30s", "2m" or "45" in seconds; raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ConfigError(
            f"{option} {text[:40]!r}: expected a time from {SHORTEST_S:g} s to a day, for example"
            f" {option} 30s"
        )
    return seconds


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _seconds_until(when: object, now_s: float) -> float | None:
    """Return how long it is until a time, in one of the two forms that clouds use."""
    if not isinstance(when, str) or not when:
        return None
    try:
        moment = datetime.datetime.fromisoformat(when.replace("Z", "+00:00"))
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(when)
        except (ValueError, TypeError):
            return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, moment.timestamp() - now_s)


def _clean(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text)[:_MAX_WHY].strip() or "notice"
