"""One sandbox provider over HTTP. Built on sockets that can be reset, halved and held, which is its purpose."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from .control import control
from .desks import Change, Create, Desk
from .faults import FAULTS, End, Fault, Waiting
from .page import STYLE, draw
from .store import Gone, Store, Stored, digest

PROBE = {"id": "probe", "status": "ok"}
LOGIN = b"<!doctype html><title>Sign in</title><form><input name=user><input name=password type=password></form>"
SILENCE = 120.0  # seconds for which a silent call is held at most


class Sandbox(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, desk: Desk, *, host: str, port: int, data: Path, token: str) -> None:
        self.desk, self.token = desk, token
        self.store, self.waiting = Store(data / f"{desk.name}.sqlite3"), Waiting()
        super().__init__((host, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away in the middle is what this place is for: no noise."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "order-desk-sandbox", ""
    server: Sandbox

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: what was received is in the store."""

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def do_DELETE(self) -> None:
        self._guarded(lambda: self._control(b""))

    def _guarded(self, handle: Any) -> None:
        self.path_only = unquote(urlsplit(self.path).path)
        self.query = dict(parse_qsl(urlsplit(self.path).query))
        self.epoch, self.request_id = self.server.store.epoch, f"req_{secrets.token_hex(6)}"
        try:
            handle()
        except Gone:
            self._reset()
        except OSError:
            self.close_connection = True

    # --- the caller's side

    def _get(self) -> None:
        if self.path_only == "/":
            order = self.query.get("order", "")
            effects = self.server.store.effects(**({"order": order} if order else {}))
            return self._send(200, draw(self.server.desk.name, effects, order=order).encode(), "text/html")
        if self.path_only == "/style.css":
            return self._send(200, STYLE.encode(), "text/css")
        if self.path_only.startswith("/_control/"):
            return self._control(b"")
        return self._look()

    def _look(self) -> None:
        """A read: it has no effect, but it can fail in all the ways in which a call can."""
        action = "probe" if self.path_only == "/probe" else "look_up"
        sought = {"reference": self.query["q"]} if "q" in self.query else {}
        facts = {"action": action, "effectful": False, **sought, **self.query, "id": self.path_only.rsplit("/", 1)[-1]}
        rule = self.server.store.take_fault(facts)
        fault = FAULTS[rule["fault"]] if rule else Fault(True)
        settings = self.server.store.settings()
        if settings["lookup_down"]:
            return self._json(503, {"error": "reads are down"})
        if fault.end in (End.STATUS, End.CLOSE, End.RESET, End.SILENCE, End.EMPTY, End.LOGIN, End.HUGE, End.ECHO):
            return self._end(fault, rule, Stored(200, {}))
        if not self._authorised():
            return self._json(401, {"error": "unknown token"})
        if rule and not self._held(fault, "before", rule, facts):
            return self._reset()
        answer = Stored(404, {"error": "not found"}) if settings["scope_lost"] else self._read()
        return self._end(fault, rule, answer)

    def _read(self) -> Stored:
        store, parts = self.server.store, self.path_only.strip("/").split("/")
        if self.path_only == "/probe":
            return Stored(200, PROBE)
        if parts[0] not in self.server.desk.collections() or len(parts) > 2:
            return Stored(404, {"error": "no such path"})
        after = int(self.query.pop("cursor", 0))
        if len(parts) == 1 and "key" in self.query:
            return Stored(200, store.by_key(parts[0], self.query["key"]))
        if len(parts) == 1:
            filters = {name: value for name, value in self.query.items() if name in ("order", "reference")}
            return Stored(200, store.page(parts[0], filters=filters, after=after))
        if parts[1] == "search" and parts[0] in self.server.desk.searchable:
            return Stored(200, store.search(parts[0], self.query.get("q", ""), after=after))
        self._imply(parts[0], parts[1])
        found = store.get(parts[0], parts[1])
        if found is None:
            return Stored(404, {"error": "not found"})
        return Stored(410, {"error": "gone"}) if "removed" in found else Stored(200, found)

    def _imply(self, collection: str, object_id: str) -> None:
        pattern = self.server.desk.implied.get(collection)
        if pattern and pattern.fullmatch(object_id):
            self.server.store.imply(collection, object_id)

    def _post(self) -> None:
        if self.path_only.startswith("/_control/"):
            return self._control(self._body())
        route = self.server.desk.route(self.path_only)
        action = route[0].action if route else ""
        facts: dict[str, Any] = {"action": action, "effectful": True, "key": self.headers.get("Idempotency-Key")}
        if self.server.store.take_fault(facts, only=("reset_before_body",)):
            return self._reset()
        body = self._body()
        fields = _parsed(body)
        facts |= {name: fields.get(name) for name in ("order", "reference")} | {"id": route and route[1]}
        rule = self.server.store.take_fault(facts, never=("reset_before_body",))
        self._note(facts, body, rule)
        return self._act(route, facts, fields, body, rule)

    def _note(self, facts: dict[str, Any], body: bytes, rule: dict[str, Any]) -> None:
        self.server.store.note_request(
            method=self.command,
            path=self.path,
            body=body.decode(errors="replace"),
            fault=rule.get("fault"),
            **{name: facts[name] for name in ("action", "key", "order", "reference")},
        )

    def _act(
        self, route: Any, facts: dict[str, Any], fields: dict[str, Any], body: bytes, rule: dict[str, Any]
    ) -> None:
        fault = FAULTS[rule["fault"]] if rule else Fault(True)
        if not fault.effect and not fault.stored:
            return self._end(fault, rule, Stored(200, {}))
        refusal = self._refusal(route, fields)
        if refusal:
            return self._send_stored(refusal)
        way, object_id = route
        key = facts["key"] if way.keyed else None
        kept = self.server.store.begin(key, digest(self.path, body), epoch=self.epoch) if key else None
        if kept and kept.status in (409, 422) and not kept.replayed:
            return self._send_stored(kept)
        if not self._held(fault, "before", rule, facts):
            if key:
                self.server.store.forget(key)
            return self._reset()
        answer = kept or self._apply(way, object_id, fields, key, fault, rule)
        if not self._held(fault, "after", rule, facts):
            return self._reset()
        return self._end(fault, rule, answer)

    def _refusal(self, route: Any, fields: dict[str, Any]) -> Stored | None:
        if not self._authorised():
            return Stored(401, {"error": "unknown token"})
        if route is None:
            return Stored(404, {"error": "no such path"})
        way = route[0]
        if isinstance(way, Create):
            wrong = [name for name, kind in way.fields.items() if type(fields.get(name)) is not kind]
            if wrong:
                return Stored(422, {"error": f"missing or malformed: {', '.join(wrong)}"})
        return None

    def _apply(
        self, way: Create | Change, object_id: str, fields: dict[str, Any], key: str | None, fault: Fault, rule: Any
    ) -> Stored:
        """Commit the effect, together with the answer that is kept under the key."""
        error = Stored(rule.get("status", fault.status), _error(rule)) if fault.stored else None
        if error and not fault.effect:
            if key:
                self.server.store.store_error(key, error, epoch=self.epoch)
            return error
        if isinstance(way, Create):
            made = self.server.store.create(
                collection=way.collection,
                kind=way.kind,
                prefix=way.prefix,
                status=way.status,
                fields=fields | _changed(fields, rule),
                key=key,
                epoch=self.epoch,
                error=error,
            )
            return error or made
        self._imply(way.collection, object_id or "")
        changed = self.server.store.change(
            collection=way.collection,
            kind=way.kind,
            object_id=object_id or "",
            status=way.status,
            key=key,
            epoch=self.epoch,
            error=error,
        )
        return error or changed

    # --- endings

    def _held(self, fault: Fault, when: str, rule: dict[str, Any], facts: dict[str, Any]) -> bool:
        """Wait where the fault says so; False where the request is to be dropped."""
        if when == "before" and rule.get("fault") == "slow":
            time.sleep(float(rule.get("seconds", 1)))
        return fault.hold != when or self.server.waiting.hold({**facts, "fault": rule["fault"]})

    def _end(self, fault: Fault, rule: dict[str, Any], answer: Stored) -> None:
        end = End.ANSWER if rule.get("answered") or (answer.replayed and fault.stored) else fault.end
        if end is End.ANSWER:
            return self._send_stored(answer)
        if end is End.STATUS:
            return self._status(rule.get("status", fault.status), rule)
        if end is End.HALF:
            return self._half(answer)
        if end is End.ECHO:
            return self._json(401, self._echo())
        if end is End.HUGE:
            return self._send(rule.get("status", fault.status), b"x" * 5_000_000, "text/plain")
        if end in (End.EMPTY, End.LOGIN):
            return self._send(200, LOGIN if end is End.LOGIN else b"", "text/html")
        if end is End.RESET:
            return self._reset()
        if end is End.SILENCE:
            self._wait_until_the_caller_leaves()
        self.close_connection = True

    def _status(self, status: int, rule: dict[str, Any]) -> None:
        headers = {"Retry-After": str(rule["retry_after"])} if "retry_after" in rule else {}
        if 300 <= status < 400:
            headers["Location"] = "/elsewhere"
        if status in (502, 504):
            return self._send(status, b"<html><h1>Bad gateway</h1></html>", "text/html", headers)
        return self._json(status, _error(rule), headers)

    def _echo(self) -> dict[str, Any]:
        sent = {"Authorization": self.headers.get("Authorization", ""), "Host": self.headers.get("Host", "")}
        return {"error": "not signed in", "request": {"headers": sent}, "contact": "jane.roe@example.com"}

    def _send_stored(self, answer: Stored) -> None:
        self._json(answer.status, answer.body, {"Idempotent-Replayed": "true"} if answer.replayed else {})

    def _half(self, answer: Stored) -> None:
        body = json.dumps(answer.body).encode()
        self._head(answer.status, len(body), "application/json", {})
        self.wfile.write(body[: len(body) // 2])
        self.close_connection = True

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body).encode(), "application/json", headers)

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), kind, headers or {})
        self.wfile.write(body)

    def _head(self, status: int, length: int, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(length), "X-Request-Id": self.request_id}
        page = {"Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'"}
        for name, value in (own | headers | (page if kind == "text/html" else {})).items():
            self.send_header(name, value)
        self.end_headers()

    def _reset(self) -> None:
        """Close at once with a reset. The descriptor goes first, or the server would end in good order with a FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True

    def _wait_until_the_caller_leaves(self) -> None:
        until = time.monotonic() + SILENCE
        while time.monotonic() < until and self.epoch == self.server.store.epoch:
            if select.select([self.connection], [], [], 0.05)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                return

    # --- small things

    def _authorised(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _control(self, body: bytes) -> None:
        # A page of another origin can post a form to this address, but not one of this type.
        if self.command != "GET" and self.headers.get("Content-Type") != "application/json":
            return self._json(415, {"error": "send application/json"})
        status, answer = control(self.server, self.command, self.path_only.split("/")[-1], self.query, _parsed(body))
        return self._json(status, answer)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body or b"{}")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _error(rule: dict[str, Any]) -> dict[str, Any]:
    """What a scripted refusal says: the name of its fault, or `says`."""
    return {"error": rule.get("says", rule["fault"])}


def _changed(fields: dict[str, Any], rule: dict[str, Any]) -> dict[str, Any]:
    """What the fault makes of the request: `change` as scripted, or an amount that is one less."""
    wrong = {"amount": fields.get("amount", 0) - 1} if rule.get("fault") == "wrong_amount" else {}
    return {**wrong, **rule.get("change", {})}
