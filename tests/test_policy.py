"""Error classes, the retry decision and the waiting times."""

from datetime import timedelta

import pytest

from reconciliation import policy
from reconciliation.policy import ErrorClass, Next, RetryPolicy, classify, decide
from reconciliation.providers import base
from reconciliation.providers.base import ActionSpec, Repeat

# The table of the design: error class -> keyed, lookup, natural, read, none.
COLUMNS = (Repeat.KEYED, Repeat.LOOKUP, Repeat.NATURAL, Repeat.READ, Repeat.NONE)
TABLE = {
    "not_sent": ("retry", "retry", "retry", "retry", "retry"),
    "unavailable": ("retry", "retry", "retry", "retry", "retry"),
    "rate_limited": ("retry", "retry", "retry", "retry", "retry"),
    "own_fault": ("hold", "hold", "hold", "hold", "hold"),
    "unknown": ("look_up", "look_up", "repeat", "repeat", "escalate"),
    "rejected": ("fail", "fail", "fail", "fail", "fail"),
    "invalid": ("fail", "fail", "fail", "fail", "fail"),
    "unauthorized": ("fail", "fail", "fail", "fail", "fail"),
    "key_in_use": ("look_up", "look_up", "repeat", "repeat", "escalate"),
}


@pytest.mark.parametrize("error_class", TABLE)
@pytest.mark.parametrize("column", range(len(COLUMNS)), ids=COLUMNS)
def test_the_decision_is_the_cell_of_the_table(error_class, column):
    repeat = COLUMNS[column]
    spec = ActionSpec(repeat=repeat, absence_is_proof=repeat is Repeat.LOOKUP)
    assert decide(ErrorClass(error_class), spec) == TABLE[error_class][column]


def test_the_table_has_no_holes():
    assert set(policy.DECISION) == set(ErrorClass)
    assert all(set(cells) == set(Repeat) for cells in policy.DECISION.values())


def test_what_is_local_and_did_not_commit_was_rolled_back():
    assert decide(ErrorClass.UNKNOWN, ActionSpec(repeat=Repeat.LOCAL)) is Next.RETRY


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (base.NotSent(), "not_sent"), (base.OwnFault(), "own_fault"), (base.Unavailable(), "unavailable"),
        (base.RateLimited(), "rate_limited"), (base.OutcomeUnknown(), "unknown"), (base.Rejected(), "rejected"),
        (base.Invalid(), "invalid"), (base.Unauthorized(), "unauthorized"), (base.KeyInUse(), "key_in_use"),
        (ValueError("an adapter's bug"), "unknown"), (TimeoutError(), "unknown"), (ConnectionResetError(), "unknown"),
        (base.ProviderError(), "unknown"),
    ],
)  # fmt: skip
def test_an_error_has_the_class_of_its_name_and_what_no_rule_names_is_unknown(error, name):
    assert classify(error, ActionSpec()) == name


@pytest.mark.parametrize("kind", [base.Unavailable, base.RateLimited, base.Rejected, base.Invalid, base.Unauthorized])
def test_a_status_that_the_action_does_not_declare_proves_nothing(kind):
    declared = ActionSpec(not_applied=frozenset({402}))
    assert classify(kind(status=402), declared) is not ErrorClass.UNKNOWN
    assert classify(kind(status=502), declared) is ErrorClass.UNKNOWN
    assert classify(kind(status=402), ActionSpec()) is ErrorClass.UNKNOWN


def test_an_action_that_declares_nothing_is_taken_at_its_most_cautious():
    spec = ActionSpec()
    assert (spec.repeat, spec.key_retention, spec.absence_is_proof) == (Repeat.NONE, timedelta(0), False)
    assert (spec.not_applied, spec.same_key_covers_earlier, spec.shown) == (frozenset(), False, ())


@pytest.mark.parametrize("error_class", list(ErrorClass))
def test_only_a_refusal_of_the_request_itself_covers_earlier_attempts_and_only_where_declared(error_class):
    covers = error_class in (ErrorClass.REJECTED, ErrorClass.INVALID)
    assert policy.covers_earlier(error_class, ActionSpec(same_key_covers_earlier=True)) is covers
    assert policy.covers_earlier(error_class, ActionSpec()) is False


@pytest.mark.parametrize(("attempt", "longest"), [(1, 2), (2, 4), (3, 8), (8, 256), (9, 300), (60, 300)])
def test_back_off_doubles_up_to_its_cap_with_jitter(settings, attempt, longest):
    settings.AFTERCALL_BACK_OFF, settings.AFTERCALL_BACK_OFF_CAP = 2.0, 300.0
    waits = [RetryPolicy().wait(attempt) for _ in range(200)]
    assert longest / 2 <= min(waits) < max(waits) <= longest
    assert len(set(waits)) > 100


@pytest.mark.parametrize(("asked", "least"), [(60, 60), (0, 0), (None, 0), (7200, 3600), (10**12, 3600), (-5, 0)])
def test_a_provider_is_not_asked_sooner_than_it_wants_but_within_the_hour(asked, least):
    wait = RetryPolicy().wait(1, retry_after=asked)
    assert least <= wait <= max(least, 2)


def test_look_ups_double_up_to_the_cap(settings):
    settings.AFTERCALL_BACK_OFF, settings.AFTERCALL_BACK_OFF_CAP = 2.0, 300.0
    assert 1.5 <= policy.look_up_delay(0) <= 2
    assert 12 <= policy.look_up_delay(3) <= 16
    assert 225 <= policy.look_up_delay(10_000) <= 300


def test_a_look_up_comes_when_absence_becomes_provable():
    assert policy.look_up_delay(5, provable_in=30) == pytest.approx(30.05)
    assert policy.look_up_delay(0, provable_in=3600) <= 2
    assert policy.look_up_delay(0, provable_in=-1) <= 2


def test_the_same_key_is_safe_for_the_retention_less_a_margin(settings):
    settings.AFTERCALL_RETENTION_MARGIN = 600
    assert policy.same_key_seconds(ActionSpec(key_retention=timedelta(days=1))) == 86400 - 600
    assert policy.same_key_seconds(ActionSpec()) < 0


def test_no_lease_outlives_the_actions_longest_duration(settings):
    settings.AFTERCALL_LEASE_MARGIN = 10
    assert policy.lease_seconds(ActionSpec(timeout=timedelta(seconds=30))) == 40
    short = ActionSpec(timeout=timedelta(seconds=30), max_duration=timedelta(seconds=35))
    assert policy.lease_seconds(short) == 35


def test_the_clock_of_deadlines_never_steps_back():
    first = policy.boot_seconds()
    assert policy.boot_seconds() >= first > 0
