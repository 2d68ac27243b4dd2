"""Looks regularly whether there is a notice: a file, or an answer over HTTP.

A source that cannot be reached is reported once, and asked again: a machine without the provider's
address must not end a job. Each request has a time limit, goes to no proxy and follows no redirect.

Threads: `watch` runs in a loop; requests run in its thread pool.
"""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from paceline.launcher.preemption.notice import MAX_BYTES, Notice, NoticeSource, read_text

_TIMEOUT_S = 1.0
_FILE_S, _HTTP_S = 0.5, 1.0  # between two looks


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        del args, kwargs


class NoticePoller:
    """One source on one host. `on_notice` is called when a notice comes and when it is gone."""

    def __init__(
        self,
        source: NoticeSource,
        on_notice: Callable[[Notice], None],
        log: Callable[[str], None],
    ) -> None:
        self._source, self._on_notice, self._log = source, on_notice, log
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        self._token = self._name = ""
        self._current: Notice | None = None
        self._has_failed = False

    async def watch(self) -> None:
        """Look until cancelled."""
        every_s = _FILE_S if self._source.path else _HTTP_S
        while True:
            try:
                found = await asyncio.to_thread(self.look)
            except (OSError, ValueError, http.client.HTTPException) as error:
                if not self._has_failed:
                    self._has_failed = True
                    self._log(
                        f"--preemption-notice {self._source.text}: {error}; asking again every"
                        f" {every_s:g} s"
                    )
            else:
                self._has_failed = False
                self._note(found)
            await asyncio.sleep(every_s)

    def _note(self, found: Notice | None) -> None:
        before, self._current = self._current, found
        if before is None and found is not None:
            self._on_notice(found)
        elif before is not None and found is None:
            self._on_notice(Notice(before.why, is_withdrawn=True))

    def look(self) -> Notice | None:
        """Return the notice that there is now; raises OSError, ValueError, HTTPException."""
        source = self._source
        if source.path:
            return self._look_at_file(source.path)
        provider = source.provider
        if provider is None:
            body = self._get(source.address, {})
            return None if body is None else read_text(body, time.time())
        headers = dict(provider.headers)
        if provider.token is not None:
            headers[provider.token[2]] = self._token or self._get_token()
        if provider.name_path and not self._name:
            self._name = (self._get(source.address + provider.name_path, headers) or "").strip()
        try:
            body = self._get(source.address + provider.path, headers)
        except urllib.error.HTTPError as error:
            self._token = ""  # it may have expired: the next look asks for another one
            raise OSError(f"HTTP {error.code} from {source.address}") from error
        return None if body is None else provider.read(body, time.time(), self._name)

    @staticmethod
    def _look_at_file(path: str) -> Notice | None:
        try:
            with open(path, "rb") as file:
                text = file.read(MAX_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None
        return read_text(text, time.time()) or Notice(f"there is {path}")

    def _get_token(self) -> str:
        provider = self._source.provider
        assert provider is not None and provider.token is not None
        path, headers, _ = provider.token
        self._token = (self._get(self._source.address + path, headers, "PUT") or "").strip()
        return self._token

    def _get(self, address: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Return a body; None if there is none: 204, 404 or empty."""
        request = urllib.request.Request(address, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                body: bytes = answer.read(MAX_BYTES)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        text = body.decode(errors="replace")
        return text if text.strip() else None
