"""What every adapter over HTTP shares: one request, no retry, and an honest account of how far it came.

A fault before the first byte is `NotSent`. From then on only a status that the action declares in `not_applied` proves
that nothing happened; all else is `OutcomeUnknown`. No text of a library and no whole answer leaves this module.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Never
from urllib.parse import quote

import httpcore2
import httpx2
import rfc8785

from reconciliation import scrub
from reconciliation.providers import base
from reconciliation.providers.base import ActionSpec, Call, Finding, Json, Receipt, Repeat, Source, Verdict
from reconciliation.providers.look_ups import Seen

ERROR_BYTES = 64 * 1024  # of an error nothing but an excerpt is kept
ANSWER_BYTES = 1024 * 1024  # a longer answer is not one of ours
CONNECT_SECONDS = 5.0
LONGEST_WAIT = 3600.0  # cap of Retry-After, in seconds
LONGEST_LIST = 60.0  # seconds in which a list must be read
PAGES = 20  # of a list; what is longer was not read to its end
EXACT = 2**53 - 1  # largest whole number that every JSON reader keeps
READING = ActionSpec(repeat=Repeat.READ, not_applied=frozenset(range(400, 600)))  # a read changes nothing
BEFORE_SENDING = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.UnsupportedProtocol,
    httpx2.LocalProtocolError,
)

# At debug level the library logs whole headers, at info level whole addresses.
for _library in ("httpx2", "httpcore2"):
    logging.getLogger(_library).setLevel(logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A status and at most `ANSWER_BYTES` of a body. `cut` says that there was more, or that its end never came."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed", "").lower() == "true"

    @property
    def request_id(self) -> str:
        return scrub.excerpt(self.headers.get("x-request-id") or self.headers.get("request-id") or "")[:100]

    def object(self) -> Json | None:
        """The JSON object in the body, in values that any store can keep; None for everything else."""
        if self.cut or "content-encoding" in self.headers:
            return None
        try:
            value = json.loads(self.body, object_pairs_hook=_members, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class HttpProvider:
    """Base of an adapter: a subclass says what an action is in terms of `send`, where to look in terms of `read_*`."""

    name: str
    account: str
    actions: Mapping[str, ActionSpec]
    probe: str | None = None  # path of an object that is known to exist, for the control read

    def __init__(self, *, base_url: str, token: str, account: str = "main") -> None:
        self.account, self._base_url, self._token = account, base_url.rstrip("/"), token
        self._client: httpx2.Client | None = None
        self._client_of = 0

    def spec(self, call: Call) -> ActionSpec:
        """The declaration of the call's action. Raises OwnFault where there is none."""
        if call.action not in self.actions:
            raise base.OwnFault(f"The provider {self.name} has no action {call.action}; nothing was sent.")
        return self.actions[call.action]

    # --- calls

    def send(self, call: Call, path: str, body: Json, *, keyed: bool = False) -> Answer:
        """POST once. Returns a 2xx answer or raises what the contract names for everything else."""
        spec = self.spec(call)
        headers = {"Idempotency-Key": call.key} if keyed else {}
        answer = self._exchange("POST", path, spec, call, body=body, headers=headers)
        if not 200 <= answer.status < 300:
            self._refuse(answer, spec, call)
        return answer

    def applied(self, answer: Answer, *, id_field: str = "id") -> Receipt:
        """The receipt in a 2xx answer. One that shows no object with an id proves nothing: OutcomeUnknown."""
        told = answer.object()
        if told is None or not told.get(id_field):
            raise base.OutcomeUnknown(
                "The provider answered, but not with an object that proves anything.",
                status=answer.status,
                request_id=answer.request_id,
                replayed=answer.replayed,
            )
        return Receipt(
            status="accepted" if answer.status == 202 else "applied",
            provider_operation_id=str(told[id_field]),
            result=told,
            observed=told,
            replayed=answer.replayed,
        )

    # --- look-ups

    def read(self, call: Call, path: str, query: Mapping[str, str] | None = None) -> Answer:
        """GET once. Returns 2xx, 404 and 410; raises Unauthorized, RateLimited, Unavailable or another for the rest."""
        answer = self._exchange("GET", path, replace(READING, timeout=self.spec(call).timeout), call, query=query)
        if not (200 <= answer.status < 300 or answer.status in (404, 410)):
            self._refuse(answer, READING, call)
        return answer

    def read_one(self, call: Call, path: str, *, id_field: str = "id") -> Finding:
        """One object by its id: FOUND, REMOVED (410), ABSENT (404, to be controlled) or CANNOT_TELL."""
        answer = self.read(call, path)
        told = Finding(verdict=Verdict.CANNOT_TELL, source=Source.BY_ID, authoritative=True, complete=True)
        if answer.status == 410:
            return replace(told, verdict=Verdict.REMOVED, note="it existed and was removed")
        if answer.status == 404:
            return replace(told, verdict=Verdict.ABSENT)
        shown = answer.object()
        if shown is None or not shown.get(id_field):
            return replace(told, complete=False, note="the answer was not an object")
        return replace(told, verdict=Verdict.FOUND, provider_operation_id=str(shown[id_field]), observed=shown)

    def read_status(self, call: Call, path: str, *, status: str) -> Finding:
        """Whether the object that a call was to change has the status that it was to get.

        FOUND if so; ABSENT if it is there with another one; CANNOT_TELL where it is not there.
        """
        finding = self.read_one(call, path)
        if finding.verdict is Verdict.ABSENT:
            self.control(call)
            return replace(finding, verdict=Verdict.CANNOT_TELL, note="the object to be changed is not there")
        if finding.verdict is Verdict.FOUND and finding.observed.get("status") != status:
            note = f"its status is {finding.observed.get('status')}, not {status}"
            return replace(finding, verdict=Verdict.ABSENT, note=note, candidates=(finding.observed,))
        return finding

    def read_all(self, call: Call, path: str, query: Mapping[str, str], *, authoritative: bool) -> Seen:
        """A list page by page, to its end where that comes within `PAGES` pages."""
        objects: list[Json] = []
        cursor, cursors = "", {""}
        until = time.monotonic() + LONGEST_LIST
        for _ in range(PAGES):
            if time.monotonic() > until:
                return Seen(objects=tuple(objects), complete=False, note="the list took too long to read")
            page = self._page(call, path, {**query, **({"cursor": cursor} if cursor else {})}, first=not cursor)
            if page is None:
                return Seen(objects=tuple(objects), complete=False, note="a page of the list could not be read")
            objects += page["data"]
            cursor = str(page.get("next") or "")
            if not cursor or cursor in cursors:
                in_progress = page.get("in_progress") is True
                whole = not cursor
                return Seen(
                    objects=tuple(objects), complete=whole, authoritative=authoritative, in_progress=in_progress
                )
            cursors.add(cursor)
        return Seen(objects=tuple(objects), complete=False, note=f"the list is longer than {PAGES} pages")

    def _page(self, call: Call, path: str, query: Mapping[str, str], *, first: bool) -> Json | None:
        try:
            page = self.read(call, path, query).object()
        except base.ProviderError:
            if first:
                raise
            return None  # what the pages before it showed must not be lost
        data = page.get("data") if page else None
        return page if isinstance(data, list) and all(isinstance(one, dict) for one in data) else None

    def control(self, call: Call) -> bool:
        """Whether an object that is known to exist can be seen: only then does an empty answer mean that there is none.

        Raises Unauthorized where it cannot: a provider may answer 404 or an empty list to a token that lost its scope.
        """
        if self.probe is None:
            return False
        answer = self.read(call, self.probe)
        if answer.status in (404, 410):
            raise base.Unauthorized(
                "The provider does not show us even what is known to exist: our credential may have lost its scope.",
                status=answer.status,
                request_id=answer.request_id,
            )
        return answer.object() is not None

    # --- the wire

    def _exchange(
        self,
        method: str,
        path: str,
        spec: ActionSpec,
        call: Call,
        *,
        body: Json | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        wire = Wire(send_by=call.send_by if body is not None else None)
        client = self._own_client()
        request = self._request(client, method, path, spec, wire, body, query, headers or {})
        wire.check()
        try:
            response = client.send(request, stream=True)
        except Exception as error:
            raise wire.fault(error) from None
        try:
            return _answer(response, seconds=spec.timeout.total_seconds())
        finally:
            response.close()

    def _own_client(self) -> httpx2.Client:
        """One client for one process: after a fork a socket would belong to two."""
        if self._client is None or self._client_of != os.getpid():
            self._client, self._client_of = _client(), os.getpid()
        return self._client

    def _request(
        self,
        client: httpx2.Client,
        method: str,
        path: str,
        spec: ActionSpec,
        wire: Wire,
        body: Json | None,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
    ) -> httpx2.Request:
        """The request, whose bytes depend on nothing but the operation: a second attempt sends the same ones."""
        own = {"Authorization": f"Bearer {self._token}"} | (
            {"Content-Type": "application/json"} if body is not None else {}
        )
        seconds = spec.timeout.total_seconds()
        try:
            return client.build_request(
                method,
                self._base_url + path,
                params=query,
                content=None if body is None else rfc8785.dumps(body),
                headers={**own, **headers},
                timeout=httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds)),
                extensions={"trace": wire.trace},
            )
        except Exception:
            raise base.OwnFault(
                "The request could not be written: address, credential or a field is malformed; nothing was sent."
            ) from None

    def _refuse(self, answer: Answer, spec: ActionSpec, call: Call) -> Never:
        error, sentence = _class_of(answer, spec)
        hidden = [value for name, value in call.request.items() if name not in spec.shown and isinstance(value, str)]
        raise error(
            sentence,
            status=answer.status,
            excerpt=scrub.excerpt(answer.body.decode(errors="replace"), known=(self._token, *hidden), torn=answer.cut),
            request_id=answer.request_id,
            replayed=answer.replayed,
            retry_after=retry_after(answer.headers),
        )


@dataclass(kw_only=True)
class Wire:
    """How far one request came, as the connection itself reports it, and until when its first byte may leave."""

    send_by: float | None
    writing: bool = field(default=False, init=False)

    def check(self) -> None:
        """Raise NotSent once the time has passed. Boot time also counts while the machine sleeps."""
        if self.send_by is not None and time.clock_gettime(time.CLOCK_BOOTTIME) >= self.send_by:
            raise base.NotSent("The time in which this call could be sent had passed; nothing was sent.")

    def trace(self, event: str, facts: Mapping[str, Any]) -> None:
        """Called by the connection: `started` comes after connecting and just before the first byte is written."""
        if event.endswith("send_request_headers.started"):
            self.check()
            self.writing = True
        elif event.endswith("send_request_headers.failed") and isinstance(
            facts.get("exception"), httpcore2.LocalProtocolError
        ):
            self.writing = False  # a malformed header is found while the bytes are made

    def fault(self, error: Exception) -> base.ProviderError:
        """What a failed exchange means."""
        if isinstance(error, base.ProviderError):
            return error
        if self.writing or not isinstance(error, BEFORE_SENDING):
            return base.OutcomeUnknown(f"The call was sent and no answer came ({type(error).__name__}).")
        if isinstance(error, httpx2.LocalProtocolError | httpx2.UnsupportedProtocol):
            return base.OwnFault(
                "The request could not be written: the address or the credential is malformed; nothing was sent."
            )
        return base.NotSent(f"The provider could not be reached ({type(error).__name__}); nothing was sent.")


def segment(value: Any) -> str:
    """One value as one segment of a path. Raises Invalid for what would turn into another path."""
    text = str(value)
    if not text or text in (".", ".."):
        raise base.Invalid(f"{text!r} is no id; nothing was sent.")
    return quote(text, safe="")


def picked(request: Json, *names: str) -> Json:
    """These fields of the request. Raises Invalid where one is missing."""
    missing = [name for name in names if name not in request]
    if missing:
        raise base.Invalid(f"The request lacks {', '.join(missing)}; nothing was sent.")
    return {name: request[name] for name in names}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds in Retry-After, from either form, capped; None where it is absent, malformed or past.

    A date is measured against the provider's own Date where it sent one, so that our clock does not matter.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        seconds = min(float(value[:12]), LONGEST_WAIT)
    else:
        then, now = _moment(value), _moment(headers.get("date", "")) or datetime.now(UTC)
        seconds = min((then - now).total_seconds(), LONGEST_WAIT) if then else 0.0
    return seconds if seconds > 0 else None


def _moment(value: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _class_of(answer: Answer, spec: ActionSpec) -> tuple[type[base.ProviderError], str]:
    """The error of the contract for a status, and our sentence. Whatever is not declared is unknown."""
    status = answer.status
    if status == 409 and spec.repeat is Repeat.KEYED and status not in spec.not_applied:
        return base.KeyInUse, "The provider is still working on a call with this key."
    stale = answer.replayed and status >= 500  # a stored error says nothing about now
    if status not in spec.not_applied or status < 400 or stale:
        again = " again, from its store" if answer.replayed else ""
        return (
            base.OutcomeUnknown,
            f"The provider answered {status}{again}, which does not prove that nothing happened.",
        )
    if status == 429:
        return base.RateLimited, "The provider took no more calls for now."
    if status in (401, 403):
        return base.Unauthorized, f"The provider refused our credential ({status})."
    if status in (408, 425) or status >= 500:
        return base.Unavailable, f"The provider was not available ({status})."
    if status in (400, 413, 415, 422):
        return base.Invalid, f"The provider found the request malformed ({status})."
    return base.Rejected, f"The provider refused the call ({status})."


def _client() -> httpx2.Client:
    """No retry, no redirect, no proxy from the environment, and no connection that is used twice.

    A kept connection may have been closed by the other side: the first byte into it would make an outcome unknown that
    a fresh connection makes certain.
    """
    limits = httpx2.Limits(max_connections=50, max_keepalive_connections=0)
    transport = httpx2.HTTPTransport(verify=_tls(), retries=0, trust_env=False, http2=False, limits=limits)
    plain = {
        "User-Agent": "aftercall",
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    return httpx2.Client(
        transport=transport, trust_env=False, follow_redirects=False, timeout=CONNECT_SECONDS, headers=plain
    )


@cache
def _tls() -> ssl.SSLContext:
    """The trusted certificates, read once: that takes longer than most calls."""
    return httpx2.create_ssl_context(trust_env=False)


def _answer(response: httpx2.Response, *, seconds: float) -> Answer:
    """The status with as much of the body as may be kept. Where the body breaks off, the status still stands."""
    limit = ANSWER_BYTES if 200 <= response.status_code < 300 else ERROR_BYTES
    until, body, cut = time.monotonic() + seconds, bytearray(), False
    try:
        for chunk in response.iter_raw():
            body += chunk[: limit + 1 - len(body)]
            if len(body) > limit or time.monotonic() > until:
                cut = True
                break
    except httpx2.HTTPError:
        cut = True
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(status=response.status_code, headers=headers, body=bytes(body[:limit]), cut=cut)


def _members(pairs: list[tuple[str, Any]]) -> Json:
    members = {_kept(name): _kept(value) for name, value in pairs}
    if len(members) < len(pairs):
        raise ValueError("a member came twice")
    return members


def _kept(value: Any) -> Any:
    """A value that a JSON column can hold: no NUL, no half of a surrogate pair, no number beyond the exact range."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_kept(one) for one in value]
    return str(value) if isinstance(value, int) and abs(value) > EXACT else value


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> Never:
    raise ValueError("not a JSON number")
