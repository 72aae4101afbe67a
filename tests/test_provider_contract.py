"""The contract that every adapter keeps, counted in the outside world. One suite over every adapter and action."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest

from reconciliation.providers import base
from reconciliation.providers.base import Repeat, Verdict, differences
from reconciliation.providers.http import HttpProvider
from tests.provider_contract import KEY, SAMPLES, Sample, a_call, recorder
from tests.world import World

every_action = pytest.mark.parametrize("sample", SAMPLES, ids=str)

# fault -> what the adapter must say, and whether the effect is there
ERRORS = {
    "unavailable": (base.Unavailable, False),
    "rate_limited": (base.RateLimited, False),
    "reject": (base.Rejected, False),
    "error_echo": (base.Unauthorized, False),
    "lost": (base.OutcomeUnknown, False),
    "close_after": (base.OutcomeUnknown, True),
    "timeout_before": (base.OutcomeUnknown, False),
    "timeout_after": (base.OutcomeUnknown, True),
    "half_answer": (base.OutcomeUnknown, True),
    "reset_before_body": (base.OutcomeUnknown, False),
    "reset_before": (base.OutcomeUnknown, False),
    "reset_after": (base.OutcomeUnknown, True),
    "bad_gateway_before": (base.OutcomeUnknown, False),
    "bad_gateway_after": (base.OutcomeUnknown, True),
    "server_error": (base.OutcomeUnknown, False),
    "server_error_after": (base.OutcomeUnknown, True),
    "empty_answer": (base.OutcomeUnknown, True),
    "html_login": (base.OutcomeUnknown, False),
    "redirect": (base.OutcomeUnknown, False),
    "huge_error": (base.OutcomeUnknown, False),
}


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDER_DESK_TIMEOUT", "0.5")


@every_action
def test_an_answered_call_is_a_receipt_and_one_effect(world: World, sample: Sample) -> None:
    provider, request = sample.provider(world), sample.ready(world)
    receipt = provider.perform(a_call(sample.action, request))
    assert receipt.status == "applied"
    assert receipt.provider_operation_id
    assert not differences(provider.actions[sample.action], request, receipt.observed)
    assert sample.at(world).count() == 1


@every_action
@pytest.mark.parametrize("fault", ERRORS)
@pytest.mark.case("A5")
def test_each_fault_has_its_name_and_one_request(world: World, sample: Sample, fault: str) -> None:
    expected, applied = ERRORS[fault]
    provider, call = sample.provider(world), a_call(sample.action, sample.ready(world))
    sample.at(world).fault(fault, times=1)
    with pytest.raises(base.ProviderError) as raised:
        provider.perform(call)
    assert type(raised.value) is expected
    assert sample.at(world).count() == (1 if applied else 0)
    assert len(sample.at(world).requests()) == (0 if fault == "reset_before_body" else 1)


@every_action
@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 422, 429, 500, 502, 503, 504, 302])
def test_a_status_that_is_not_declared_proves_nothing(world: World, sample: Sample, status: int) -> None:
    provider, call = sample.provider(world), a_call(sample.action, sample.ready(world))
    provider.actions = {name: base.ActionSpec(repeat=Repeat.NONE) for name in provider.actions}
    sample.at(world).fault("bad_gateway_after", status=status)
    with pytest.raises(base.OutcomeUnknown) as raised:
        provider.perform(call)
    assert raised.value.status == status


@every_action
@pytest.mark.case("A5")
def test_a_refused_connection_was_not_sent(world: World, sample: Sample) -> None:
    provider, call = sample.provider(world), a_call(sample.action, sample.ready(world))
    sample.at(world).kill()
    with pytest.raises(base.NotSent) as raised:
        provider.perform(call)
    assert not isinstance(raised.value, base.OwnFault)
    sample.at(world).start()
    assert (sample.at(world).requests(), sample.at(world).count()) == ([], 0)


@every_action
def test_two_attempts_send_the_same_bytes(sample: Sample) -> None:
    request = {**sample.request, "id": "x1"} if sample.needs else sample.request
    again = {name: float(value) if type(value) is int else value for name, value in reversed(request.items())}
    with recorder() as (address, received):
        for attempt, body in ((1, request), (2, again)):
            with pytest.raises(base.OutcomeUnknown):
                sample.make(base_url=address, token="t").perform(a_call(sample.action, body, attempt=attempt))
    assert len(received) == 2
    assert received[0] == received[1]
    assert KEY.encode() in received[0]
    assert b"Connection: close" in received[0]  # a kept one may be stale, and a stale one makes an outcome unknown


@every_action
def test_nothing_is_sent_once_the_time_to_send_has_passed(world: World, sample: Sample) -> None:
    provider, request = sample.provider(world), sample.ready(world)
    with pytest.raises(base.NotSent, match="had passed"):
        provider.perform(a_call(sample.action, request, send_by=time.clock_gettime(time.CLOCK_BOOTTIME) - 0.001))
    assert sample.at(world).requests() == []


@every_action
def test_the_time_is_looked_at_again_after_connecting(
    world: World, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, request = sample.provider(world), sample.ready(world)
    readings = iter([10.0, 20.0])
    monkeypatch.setattr(time, "clock_gettime", lambda clock: next(readings))
    with pytest.raises(base.NotSent, match="had passed"):
        provider.perform(a_call(sample.action, request, send_by=15.0))
    assert sample.at(world).requests() == []


@every_action
@pytest.mark.parametrize("token", ["two\r\nlines", "clé", "nul\0"])
def test_a_malformed_credential_is_our_own_fault_and_nothing_is_sent(world: World, sample: Sample, token: str) -> None:
    provider, call = sample.provider(world, token=token), a_call(sample.action, sample.ready(world))
    with pytest.raises(base.OwnFault) as raised:
        provider.perform(call)
    assert token not in str(raised.value)
    assert sample.at(world).requests() == []


@every_action
def test_an_action_without_a_handler_is_our_own_fault(world: World, sample: Sample) -> None:
    with pytest.raises(base.OwnFault):
        sample.provider(world).perform(a_call("no.such", sample.request))


@every_action
def test_a_request_that_lacks_a_field_is_refused_before_it_is_sent(world: World, sample: Sample) -> None:
    with pytest.raises(base.Invalid):
        sample.provider(world).perform(a_call(sample.action, {}))
    assert sample.at(world).requests() == []


@every_action
def test_an_effect_without_an_answer_is_found(world: World, sample: Sample) -> None:
    provider, call = sample.provider(world), a_call(sample.action, sample.ready(world))
    sample.at(world).fault("reset_after")
    with pytest.raises(base.OutcomeUnknown):
        provider.perform(call)
    finding = provider.look_up(call)
    assert finding.verdict is Verdict.FOUND
    assert finding.provider_operation_id == sample.at(world).effects()[0]["id"]
    assert not differences(provider.actions[sample.action], call.request, finding.observed)


@every_action
def test_an_empty_answer_is_absence_only_where_the_source_can_prove_it(world: World, sample: Sample) -> None:
    provider, call = sample.provider(world), a_call(sample.action, sample.ready(world))
    finding = provider.look_up(call)
    if sample.consistent:
        assert (finding.verdict, finding.authoritative, finding.complete) == (Verdict.ABSENT, True, True)
    else:
        assert (finding.verdict, finding.authoritative) == (Verdict.CANNOT_TELL, False)
    assert provider.actions[sample.action].absence_is_proof is sample.consistent


@every_action
@pytest.mark.parametrize("fault", ["unavailable", "reset_before", "timeout_before", "half_answer", "html_login"])
def test_a_look_up_that_is_not_answered_never_says_absent(world: World, sample: Sample, fault: str) -> None:
    provider, call = sample.provider(world), a_call(sample.action, sample.ready(world))
    sample.at(world).fault(fault, action="look_up", times=1)
    try:
        verdict = provider.look_up(call).verdict
    except base.ProviderError:
        verdict = Verdict.CANNOT_TELL
    assert verdict is Verdict.CANNOT_TELL


@every_action
@pytest.mark.case("C4")
def test_a_credential_that_lost_its_scope_is_never_absence(world: World, sample: Sample) -> None:
    provider, call = sample.provider(world), a_call(sample.action, sample.ready(world))
    provider.perform(call)
    sample.at(world).set(scope_lost=True)
    with pytest.raises(base.Unauthorized):
        provider.look_up(call)


@every_action
def test_what_is_declared_hangs_together(world: World, sample: Sample) -> None:
    spec = sample.provider(world).actions[sample.action]
    assert not set(spec.compare) & set(spec.volatile)
    assert spec.absence_is_proof or spec.repeat is not Repeat.LOOKUP
    assert bool(spec.key_retention) is (spec.repeat is Repeat.KEYED)
    assert not spec.not_applied & {500, 502, 504}
    assert spec.timeout < spec.max_duration


def test_no_proxy_of_the_environment_is_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    SAMPLES[0].provider(world).perform(a_call())
    assert world.pay.count() == 1


def test_a_redirect_is_not_followed(world: World) -> None:
    world.pay.fault("redirect")
    with pytest.raises(base.OutcomeUnknown) as raised:
        SAMPLES[0].provider(world).perform(a_call())
    assert raised.value.status == 307
    assert len(world.pay.requests()) == 1


def test_a_fork_gets_a_connection_of_its_own(world: World) -> None:
    provider = SAMPLES[0].provider(world)
    provider.perform(a_call())
    before = provider._own_client()
    child = os.fork()
    if child == 0:
        own = provider._own_client()
        os._exit(0 if own is not before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert provider._own_client() is before


def test_the_factories_take_their_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    from examples.order_desk import providers

    monkeypatch.setenv("ORDER_DESK_KEY_RETENTION", "60")
    made: list[Any] = [providers.pay(), providers.carrier(), providers.mail(), providers.tickets()]
    assert [one.name for one in made] == ["pay", "carrier", "mail", "tickets"]
    assert made[0].actions["refund.create"].key_retention == timedelta(seconds=60)
    assert isinstance(made[0], HttpProvider)
    assert made[0].perform(a_call()).status == "applied"
