"""What a stranger's text may leave behind."""

import json
import time

import pytest

from reconciliation.scrub import LIMIT, WINDOW, excerpt


@pytest.mark.case("K3")
@pytest.mark.parametrize(
    "text",
    [
        '{"error":"no","headers":{"Authorization":"OAuth CANARY6"}}',
        '{"error":"no","headers":["Authorization: OAuth CANARY6"]}',
        '{"error":"no","headers":[["Authorization","OAuth CANARY6"]]}',
        '{"error":"{\\"Authorization\\":\\"OAuth CANARY6\\"}"}',
        "GET / HTTP/1.1\r\nAuthorization: OAuth CANARY6\r\nAccept: */*",
        "Authorization=Token CANARY6",
        "Proxy-Authorization: Digest username=CANARY6, realm=CANARY6",
        "Set-Cookie: session=CANARY6; Path=/",
        "X-Api-Key: CANARY6",
        "idempotency-key: CANARY6",
        "Bearer CANARY6 was refused",
        "<b>password=CANARY6</b>",
        '{"headers":[["Authorization","CANARY6"]]}',
        '{"headers":[{"name":"Authorization","value":"CANARY6"}]}',
        "'client_secret': 'CANARY6 CANARY6'",
        "could not reach https://user:CANARY6@example.com/x",
        "https://example.com/?access_token=CANARY6&x=1",
        "key sk-live-CANARY6",
        "eyJhbGciOiJIUzI1NiJ9.CANARY6.x",
        "the known one is kn0wnCANARY6.",
        "the known one is kn0wn%2FCANARY6.",
    ],
)
def test_credentials_are_removed_in_every_guise(text: str) -> None:
    assert "CANARY6" not in excerpt(text, known=("kn0wnCANARY6", "kn0wn/CANARY6"))


@pytest.mark.case("K3")
@pytest.mark.parametrize(
    "text",
    [
        "write to jane.roe@example.com now",
        '{"contact":"jane.roe@example.com"}',
        '{"contact":"jane.roe\\u0040example.com"}',
        "<jane.roe@example.com>",
        "mailto:jane.roe@example.com",
        '{"cut off": "jane.roe\\u0040example.com", ',
    ],
)
def test_addresses_are_masked(text: str) -> None:
    kept = excerpt(text)
    assert "jane.roe" not in kept
    assert "j***@example.com" in kept


def test_what_says_why_is_kept() -> None:
    told = "amount 4200 is above the limit of order 1002 (shipping to 10115)"
    assert excerpt(told) == told
    assert "insufficient_funds" in excerpt('{"error":{"code":"insufficient_funds"}}')


def test_it_is_one_short_line_of_printable_signs() -> None:
    kept = excerpt("a\0b\u202ec\nd\ud800 " + "x" * 1000)
    assert len(kept) == LIMIT
    assert kept.isprintable()
    assert kept.startswith("a b c d x")


def test_half_a_secret_at_a_cut_is_not_kept() -> None:
    assert "CANA" not in excerpt("x kn0wnCANA", known=("kn0wnCANARY6",), torn=True)
    assert "CANARY6" not in excerpt(" " * (WINDOW - 16) + "secret=CANARY6 and more")


@pytest.mark.parametrize("unit", ["a", "a.", "@", "a@", "://a", "token=", "[", '{"a":', "sk-", "\\", "="])
def test_a_hostile_text_costs_little_time(unit: str) -> None:
    started = time.perf_counter()
    excerpt(unit * (65_536 // len(unit)))
    assert time.perf_counter() - started < 2.0


def test_deep_json_does_no_harm() -> None:
    deep = "[" * 50_000 + "]" * 50_000
    assert len(excerpt(deep)) <= LIMIT
    assert "CANARY6" not in excerpt(json.dumps({"a": [[{"token": {"x": "CANARY6"}}]]}))
