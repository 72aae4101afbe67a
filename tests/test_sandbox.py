"""The sandbox providers do what their description says: tests that count effects in them rest on that."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until
from tests.world import ROOT, TOKEN, Server, World

REFUND = {"order": "1002", "amount": 4200, "currency": "USD", "card": "card_9", "reference": "k1"}


def call(server: Server, path: str, body: Any = None, *, key: str = "", token: str = TOKEN) -> tuple[int, Any, Any]:
    """Status, JSON and headers of one plain call."""
    headers = {"Authorization": f"Bearer {token}"} | ({"Idempotency-Key": key} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        answer = opener.open(request, timeout=10)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, json.loads(answer.read() or b"null"), answer.headers


def test_a_key_repeats_the_answer_and_not_the_effect(world: World) -> None:
    first = call(world.pay, "/refunds", REFUND, key="k1")
    second = call(world.pay, "/refunds", REFUND, key="k1")
    assert (first[0], first[1]) == (second[0], second[1])
    assert (first[2]["Idempotent-Replayed"], second[2]["Idempotent-Replayed"]) == (None, "true")
    assert world.pay.count(order="1002") == 1
    assert len(world.pay.requests(key="k1")) == 2


def test_a_key_with_another_body_is_refused(world: World) -> None:
    call(world.pay, "/refunds", REFUND, key="k1")
    assert call(world.pay, "/refunds", REFUND | {"amount": 1}, key="k1")[0] == 422
    assert world.pay.count() == 1


def test_a_key_in_progress_is_refused_until_its_call_ends(world: World) -> None:
    world.pay.fault("hang_before_effect")
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(
            urllib.request.Request(
                f"{world.pay.url}/refunds",
                data=json.dumps(REFUND).encode(),
                headers={"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": "k1"},
            ),
            timeout=0.3,
        )
    assert call(world.pay, "/refunds", REFUND, key="k1")[0] == 409
    assert call(world.pay, "/refunds?key=k1")[1]["in_progress"] is True
    assert world.pay.count() == 0
    world.pay.release(drop=True)
    wait_until(lambda: call(world.pay, "/refunds", REFUND, key="k1")[0] == 201)
    assert world.pay.count() == 1


def test_a_stored_error_is_replayed_with_a_mark(world: World) -> None:
    world.pay.fault("server_error")
    assert call(world.pay, "/refunds", REFUND, key="k1")[0] == 500
    status, _, headers = call(world.pay, "/refunds", REFUND, key="k1")
    assert (status, headers["Idempotent-Replayed"]) == (500, "true")
    assert world.pay.count() == 0


def test_a_key_is_forgotten_after_its_retention(world: World) -> None:
    world.pay.set(key_retention=60)
    call(world.pay, "/refunds", REFUND, key="k1")
    world.pay.advance(61)
    assert call(world.pay, "/refunds?key=k1")[1]["data"] == []
    assert call(world.pay, "/refunds", REFUND, key="k1")[0] == 201
    assert world.pay.count(key="k1") == 2


def test_effects_and_keys_survive_a_kill(world: World) -> None:
    world.pay.fault("slow", order="1003", seconds=5)
    first = call(world.pay, "/refunds", REFUND, key="k1")
    world.pay.restart()
    assert call(world.pay, "/refunds", REFUND, key="k1")[1] == first[1]
    assert world.pay.count() == 1
    assert world.pay.control("GET", "faults")["faults"]


def test_the_index_lags_and_the_list_does_not(world: World) -> None:
    world.mail.set(lag=60)
    call(world.mail, "/messages", {"to": "j@example.com", "subject": "s", "body": "b", "reference": "k1"})
    assert call(world.mail, "/messages/search?q=k1")[1]["data"] == []
    assert len(call(world.mail, "/messages?reference=k1")[1]["data"]) == 1
    world.mail.advance(61)
    assert len(call(world.mail, "/messages/search?q=k1")[1]["data"]) == 1


def test_a_list_comes_in_pages(world: World) -> None:
    world.mail.set(page_size=2)
    for number in range(5):
        world.mail.plant("message", to="j@example.com", subject=str(number), body="b", reference="k1")
    seen, cursor = [], ""
    while cursor is not None:
        page = call(world.mail, f"/messages?reference=k1&cursor={cursor or 0}")[1]
        seen += [row["subject"] for row in page["data"]]
        cursor = page["next"]
    assert seen == ["0", "1", "2", "3", "4"]


def test_mail_knows_no_key(world: World) -> None:
    message = {"to": "j@example.com", "subject": "s", "body": "b", "reference": "k1"}
    for _ in range(2):
        call(world.mail, "/messages", message, key="k1")
    assert world.mail.count(reference="k1") == 2


def test_closing_a_ticket_twice_is_one_effect(world: World) -> None:
    assert call(world.tickets, "/tickets/T-77")[1]["status"] == "open"
    for _ in range(2):
        assert call(world.tickets, "/tickets/T-77/close", {})[1]["status"] == "closed"
    assert world.tickets.count(id="T-77") == 1


def test_a_label_is_voided_once(world: World) -> None:
    made = call(world.carrier, "/labels", {"order": "1", "sender": "a", "service": "b"}, key="k1")[1]
    for _ in range(2):
        call(world.carrier, f"/labels/{made['id']}/void", {}, key="undo")
    assert [row["kind"] for row in world.carrier.effects()] == ["label", "label.void"]


def test_nothing_is_told_without_the_token_and_nothing_is_seen_without_the_scope(world: World) -> None:
    assert call(world.pay, "/refunds", REFUND, key="k1", token="other")[0] == 401
    made = call(world.pay, "/refunds", REFUND, key="k1")[1]
    assert call(world.pay, "/probe")[0] == 200
    world.pay.set(scope_lost=True)
    assert (call(world.pay, f"/refunds/{made['id']}")[0], call(world.pay, "/probe")[0]) == (404, 404)
    assert world.pay.count() == 1


def test_the_page_shows_the_effects_of_one_order(world: World) -> None:
    call(world.pay, "/refunds", REFUND | {"card": "<b>card</b>"}, key="k1")
    call(world.pay, "/refunds", REFUND | {"order": "1003"}, key="k2")
    page = world.pay.page("/?order=1002")
    assert "Order 1002" in page
    assert "Order 1003" not in page
    assert "&lt;b&gt;card" in page


def test_a_page_of_another_origin_cannot_script_faults(world: World) -> None:
    request = urllib.request.Request(f"{world.pay.url}/_control/reset", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="415"):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5)


@pytest.mark.processes
def test_the_servers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.world import World\n"
        f"world = World(Path({str(tmp_path)!r}))\nworld.start()\nprint(world.pay.port, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    with parent.stdout:
        port = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    wait_until(lambda: _refused(port))


def _refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_faults_of_one_order_are_forgotten_alone(world: World) -> None:
    for order in ("1002", "1003"):
        world.pay.fault("unavailable", order=order)
    world.pay.control("DELETE", "faults?order=1002", {})
    assert call(world.pay, "/refunds", REFUND, key="k1")[0] == 201
    assert call(world.pay, "/refunds", REFUND | {"order": "1003", "reference": "k2"}, key="k2")[0] == 503
