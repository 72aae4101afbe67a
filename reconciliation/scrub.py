"""Make a stranger's text fit to keep: what a provider answers may repeat our credential or a customer's data.

Removed: known secrets, header-like values, credentials by scheme, by well-known prefix or in a URL, `key=secret` pairs.
E-mail addresses are masked as `j***@example.com`. What is left is one line of at most `LIMIT` characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

LIMIT = 300
CUT = "…"
REMOVED = "[removed]"
WINDOW = 16_384  # longer texts are cut before anything looks at them
TORN = 1_024  # the end of a cut text is dropped: it may hold half of something that would have been removed
DEEP = 20

_SENSITIVE = (
    r"(?:authorization|cookie|passw(?:or)?d|passphrase|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|"
    r"idempotency[_-]?key|signature|credential|session|cvc|cvv|card[_-]?number|iban)"
)
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_SENSITIVE_NAME = re.compile(_SENSITIVE, re.IGNORECASE)
# Every repetition is bounded, so that a hostile text costs time in proportion to its length and no more.
_RULES = (
    (re.compile(r"\b([a-z][a-z0-9+.-]{0,20}://)[^/\s@\"'<>]{1,300}@", re.IGNORECASE), rf"\1{REMOVED}@"),
    (
        re.compile(
            r"(?<![\w-])((?:proxy-)?authorization|(?:set-)?cookie)[\"']?\s{0,3}[:=]\s{0,3}[^\r\n\"']{1,4000}", re.I
        ),
        rf"\1: {REMOVED}",
    ),
    (
        re.compile(
            rf"([\w.-]{{0,40}}{_SENSITIVE}[\w.-]{{0,40}}[\"']?\s{{0,3}}[:=]\s{{0,3}})(\"[^\"]{{0,4000}}\"|'[^']{{0,4000}}'|"
            r"[^\s\"'&,;<>{}\[\]]{1,4000})",
            re.IGNORECASE,
        ),
        rf"\1{REMOVED}",
    ),
    (
        re.compile(r"\b(bearer|basic|oauth|digest|negotiate|apikey)\s{1,3}[\w.~+/=:-]{4,4000}", re.IGNORECASE),
        rf"\1 {REMOVED}",
    ),
    (re.compile(r"\b(?:sk|pk|rk|whsec|gh[pousr]|xox[abprs]|AKIA|eyJ)[\w.-]{8,4000}"), REMOVED),
    (
        re.compile(r"(?<![\w.+%'-])([\w])[\w.+%'-]{0,63}@([\w-]{1,63}(?:\.[\w-]{1,63}){1,8})"),
        r"\1***@\2",
    ),
)


def excerpt(text: str, *, known: Iterable[str] = (), torn: bool = False) -> str:
    """What of `text` may be stored and shown.

    `known` are secrets and hidden values that must not appear, `torn` says that the text was cut by its reader.
    """
    if len(text) > WINDOW:
        text, torn = text[:WINDOW], True
    if torn:
        text = text[:-TORN]
    cleaned = _text(_structured(text), tuple(known))
    return cleaned if len(cleaned) <= LIMIT else cleaned[: LIMIT - 1] + CUT


def _structured(text: str) -> str:
    """JSON with the values of secret-looking names taken out, and without escapes that would hide a pattern."""
    try:
        return json.dumps(_walked(json.loads(text)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text).replace('\\"', '"').replace("\\/", "/")


def _walked(value: Any, depth: int = 0) -> Any:
    if depth > DEEP:
        return REMOVED
    if isinstance(value, dict):
        named = any(_sensitive(value.get(label)) for label in ("name", "key", "header"))
        hidden = {name for name in value if _sensitive(name) or (named and name == "value")}
        return {name: REMOVED if name in hidden else _walked(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list):
        if len(value) == 2 and _sensitive(value[0]):
            return [value[0], REMOVED]
        return [_walked(one, depth + 1) for one in value]
    return value


def _sensitive(name: Any) -> bool:
    return isinstance(name, str) and len(name) < 80 and bool(_SENSITIVE_NAME.search(name))


def _text(text: str, known: tuple[str, ...]) -> str:
    for secret in sorted({form for value in known for form in (value, quote(value, safe=""))}, key=len, reverse=True):
        if len(secret) >= 4:
            text = text.replace(secret, REMOVED)
    text = text.replace('\\"', '"')
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def fault(error: BaseException) -> dict[str, str]:
    """What a log may say of an exception: its class and where it was raised, never its text."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else ""
    return {"error": type(error).__name__, "at": place}
