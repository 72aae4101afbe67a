"""What the documentation says of the code: its examples run, its links lead somewhere, its tables leave nothing out."""

import re
import sys
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
from django.conf import settings as django_settings

from reconciliation import executor, registry, runs, sweeping, workers
from reconciliation.executor import Intent
from reconciliation.keys import Identity
from reconciliation.models import Message, Operation
from reconciliation.providers import base
from reconciliation.providers.base import ActionSpec, Repeat
from tests.world import ROOT, TOKEN, World

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONNECT = (ROOT / "docs/connect.md").read_text()


@pytest.fixture
def from_the_page(ledger_db, world: World, settings, monkeypatch):
    """The code of docs/connect.md as a module, connected to the sandbox's pay."""
    monkeypatch.setenv("BILLING_URL", world.pay.url)
    monkeypatch.setenv("BILLING_TOKEN", TOKEN)
    module = ModuleType("from_the_page")
    monkeypatch.setitem(sys.modules, "from_the_page", module)
    for block in re.findall(r"```python\n(.*?)```", CONNECT, re.DOTALL):
        exec(compile(block, "docs/connect.md", "exec"), module.__dict__)
    settings.AFTERCALL_PROVIDERS = ["from_the_page.billing"]
    settings.AFTERCALL_WORKFLOWS = ["from_the_page.GOODWILL"]
    registry.forget()
    workers._known.clear()
    yield module
    registry.forget()


def test_the_workflow_on_the_page_refunds_once(from_the_page, world: World) -> None:
    assert runs.advance(from_the_page.give("1002", 4200, "card_9").pk).state == "succeeded"
    assert runs.advance(from_the_page.give("1002", 4200, "card_9").pk).state == "succeeded"
    assert world.pay.count(order="1002") == 1


def test_the_single_call_on_the_page_is_made_once_and_looked_up(from_the_page, world: World) -> None:
    world.pay.fault("reset_after", order="1002")
    first = from_the_page.refund_once("1002", 4200, "card_9", wish="w1")
    again = from_the_page.refund_once("1002", 4200, "card_9", wish="w1")
    assert (first.outcome, first.disposition, again.disposition) == ("unknown", "executed", "wait")
    operation = Operation.objects.get()
    call = base.Call(action="refund", key=operation.key, request=operation.request, tenant="acme", attempt=1)
    assert from_the_page.billing().look_up(call).verdict == "found"
    assert world.pay.count(order="1002") == 1


def test_the_local_effect_on_the_page_is_done_once(from_the_page, superuser_connection, settings) -> None:
    superuser_connection.execute(
        "CREATE TABLE desk_outcome (id bigserial PRIMARY KEY, order_id text, outcome text, reference text);"
        "GRANT ALL ON desk_outcome, desk_outcome_id_seq TO PUBLIC"
    )
    settings.AFTERCALL_PROVIDERS = ["from_the_page.Desk"]
    registry.forget()
    try:
        identity = Identity(
            tenant="acme", workflow_type="claim", workflow_id="c1", step="record", business_object="1002"
        )
        wish = {"order": "1002", "outcome": "refunded"}
        intent = Intent(identity=identity, provider="desk", action="outcome.record", request=wish)
        told = [executor.perform(intent, actor=from_the_page.AGENT).disposition for _ in range(2)]
        assert told == ["executed", "replay"]
        assert superuser_connection.execute("SELECT count(*) FROM desk_outcome").fetchone() == (1,)
    finally:
        superuser_connection.execute("DROP TABLE desk_outcome")


def test_what_the_page_puts_into_the_outbox_is_done_once(from_the_page, world: World) -> None:
    for _ in range(2):
        from_the_page.accept_return("1002", 4200, "card_9")
        sweeping.sweep()
    assert world.pay.count(order="1002") == 1
    assert Message.objects.get().operation_id == Operation.objects.get(state="succeeded").pk


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_every_promise_of_an_action_is_explained() -> None:
    assert [field.name for field in fields(ActionSpec) if f"`{field.name}`" not in CONNECT] == []
    assert [one.name for one in Repeat if f"`{one.name}`" not in CONNECT] == []
    errors = {name for name, one in vars(base).items() if isinstance(one, type) and issubclass(one, base.ProviderError)}
    assert [name for name in errors - {"ProviderError"} if f"`{name}`" not in CONNECT] == []


def test_every_variable_is_documented() -> None:
    told = "".join(page.read_text() for page in PAGES)
    source = (ROOT / "console/settings.py").read_text()
    names = set(re.findall(r'(?:environ\.get|_flag|_words|_apps|_seconds)\("(AFTERCALL_[A-Z_]+)"', source))
    assert len(names) > 10
    assert [name for name in sorted(names - {"AFTERCALL_EXAMPLE"}) if f"`{name}`" not in told] == []
    assert django_settings.AFTERCALL_LEASE_MARGIN == 10, "the defaults in docs/operate.md"


def test_an_action_that_contradicts_itself_is_not_declared() -> None:
    with pytest.raises(ValueError, match="absence_is_proof"):
        ActionSpec(repeat=Repeat.LOOKUP)
    with pytest.raises(ValueError, match="'amount' is compared"):
        ActionSpec(volatile=("amount",), compare={"amount": "amount"})
    assert ActionSpec(repeat=Repeat.LOOKUP, absence_is_proof=True).settles_after == timedelta(minutes=10)
