"""What people read, from rows that no database has seen."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from console.templatetags.words import seen, seen_plain
from reconciliation import case_wording, wording
from reconciliation.models import JournalEntry, Operation
from reconciliation.providers.base import ActionSpec, Repeat
from reconciliation.states import RunState, State
from reconciliation.transition import HELD_BACK

NOW = datetime(2026, 11, 29, 14, 31, tzinfo=UTC)
SPEC = ActionSpec(
    repeat=Repeat.KEYED,
    headline="Refund {amount} for order {order}",
    money=("amount", "currency"),
    compare={"order": "order", "amount": "total", "card": "card"},
)


def operation(**columns):
    facts = {"provider": "pay", "action": "refund.create", "business_object": "1002", "step": "issue_refund"}
    facts |= {"request_shown": '{"order":"1002","amount":4200,"currency":"USD"}', "amount_minor": 4200}
    facts |= {"currency": "USD", "state": "ambiguous", "attempts": 1, "unknown_attempts": [1]}
    facts |= {"first_sent_at": NOW - timedelta(minutes=28), "last_sent_at": NOW - timedelta(minutes=28)}
    return Operation(**facts | columns)


def entry(kind, pk=1, **data):
    import json

    return JournalEntry(pk=pk, kind=kind, at=NOW - timedelta(minutes=pk), attempt=1, data=json.dumps(data))


def at(moment):
    return f"{moment:%H:%M:%S}"


@pytest.mark.parametrize(
    ("minor", "currency", "written"),
    [
        (4200, "USD", "42.00 USD"),
        (5, "USD", "0.05 USD"),
        (-5, "EUR", "-0.05 EUR"),
        (0, "USD", "0.00 USD"),
        (128400, "USD", "1,284.00 USD"),
        (4200, "JPY", "4,200 JPY"),
        (-300, "KRW", "-300 KRW"),
        (1234567, "KWD", "1,234.567 KWD"),
        (1, "BHD", "0.001 BHD"),
        (12345, "CLF", "1.2345 CLF"),
        (4200, "usd", "42.00 usd"),
        (4200, "", "42.00"),
    ],
)
def test_money_is_written_from_minor_units(minor, currency, written):
    assert wording.money(minor, currency) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h 00 m"),
        (7500, "2 h 05 m"),
        (86399, "23 h 59 m"),
        (86400, "1 d 0 h"),
        (273600, "3 d 4 h"),
        (-7500, "2 h 05 m"),
    ],
)
def test_durations_are_rounded_down_to_two_units(seconds, written):
    assert wording.duration(timedelta(seconds=seconds)) == written


def test_the_headline_is_one_sentence_from_the_data():
    assert case_wording.headline(operation(), SPEC) == "Refund 42.00 USD for order 1002"


def test_a_hidden_field_leaves_its_name_in_the_headline():
    bare = operation(request_shown="{}", amount_minor=None)
    assert case_wording.headline(bare, SPEC) == "Refund (amount hidden) for order (order hidden)"


def test_without_a_spec_the_headline_is_plain():
    assert case_wording.headline(operation(), None) == "pay refund.create 42.00 USD for 1002"


def test_an_undo_says_what_it_undoes():
    assert case_wording.headline(operation(step="undo:create_label"), SPEC).endswith("(undo of create_label)")


def test_the_lede_tells_what_happened_in_order():
    told = case_wording.lede(
        operation(
            escalated_at=NOW,
            escalation_reason="no_conclusive_answer",
            look_ups=3,
        ),
        [entry("lease_expired", 2, owner="worker:w-3"), entry("finding", 3, verdict="cannot_tell")],
        clock=at,
    )
    assert told == (
        "Sent at 14:03:00, no answer; worker w-3 lost by 14:29:00. Looked up 3 times, the last time: cannot tell. "
        "Automation stopped at 14:31:00: no look-up gave a conclusive answer in time."
    )


def test_an_answered_second_attempt_is_not_said_to_have_none():
    columns = {"attempts": 2, "unknown_attempts": [1], "look_ups": 4, "state": "succeeded", "basis": "receipt"}
    told = case_wording.lede(operation(**columns), [entry("finding", 1, verdict="absent")], clock=at)
    assert "no answer to attempt 1." in told
    assert "Looked up 4 times since attempt 1, the last time: nothing there." in told
    assert "since the last attempt" not in told


@pytest.mark.parametrize("look_ups", [0, 1, 3])
def test_the_list_and_the_case_count_look_ups_alike(look_ups):
    seen, case = [entry("finding", 1, verdict="cannot_tell")], operation(look_ups=look_ups, attempts=2)
    _, listed, _ = case_wording.known(case, seen, None, now=NOW)
    counted = re.search("looked up (.*?)(?:, the last time)?:", case_wording.lede(case, seen, clock=at), re.IGNORECASE)
    assert counted
    assert f"looked up {counted[1]}: cannot tell" in listed


def test_what_was_never_sent_is_said_to_be_so():
    fresh = operation(state="ready", attempts=0, unknown_attempts=[], first_sent_at=None, last_sent_at=None)
    assert case_wording.lede(fresh, [], clock=at) == "Recorded; nothing was ever sent."
    assert case_wording.dispatch(fresh).code == "never_sent"


@pytest.mark.parametrize(
    ("columns", "entries", "code"),
    [
        ({}, [], "no_answer"),
        ({}, [entry("no_answer", error_class="unknown")], "no_answer"),
        ({}, [entry("late_report")], "answered_not_recorded"),
        ({}, [entry("finding", verdict="mismatch")], "contradictory"),
        ({}, [entry("finding", verdict="several")], "contradictory"),
        ({}, [entry("finding", 1, verdict="found"), entry("finding", 2, verdict="absent")], "contradictory"),
        ({"state": "pending"}, [], "under_way"),
        ({"state": "succeeded", "unknown_attempts": [], "basis": "receipt"}, [], "answered"),
        ({"state": "failed_terminal", "unknown_attempts": [1], "basis": "asserted"}, [], "asserted"),
        ({"state": "terminated"}, [], "no_answer"),
        ({"state": "failed_retryable", "unknown_attempts": []}, [], "answered"),
    ],
)
def test_the_dispatch_verdict(columns, entries, code):
    assert case_wording.dispatch(operation(**columns), entries).code == code


def test_a_rejection_of_attempt_two_never_reads_as_not_applied():
    told = case_wording.dispatch(
        operation(attempts=2), [entry("no_answer"), entry("not_applied", 2, error_class="rejected")]
    )
    assert told.title == "Sent, no answer"


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"same_key_until": NOW + timedelta(hours=2, minutes=5)}, "safe for 2 h 05 m"),
        ({"same_key_until": NOW - timedelta(minutes=5)}, "over since 5 min"),
        ({"same_key_until": None}, "none: would send again"),
        ({"same_key_until": NOW + timedelta(hours=2), "sighted": True}, "not offered: seen there"),
        ({"state": "succeeded"}, "settled"),
    ],
)
def test_how_long_the_same_key_is_safe(columns, says):
    assert case_wording.same_key(operation(**columns), SPEC, now=NOW) == says


def test_what_may_be_done_twice_needs_no_key():
    natural = ActionSpec(repeat=Repeat.NATURAL)
    assert case_wording.same_key(operation(same_key_until=None), natural, now=NOW) == "safe: twice is once"


def test_asked_and_found_are_compared_field_by_field():
    rows = case_wording.comparison(
        operation(),
        SPEC,
        hidden=("card",),
        seen={"order": "1002", "total": 420, "status": "settled"},
        judged={"order": "equal", "amount": "differs", "card": "equal"},
    )
    assert [(row.name, row.asked, row.found, row.same) for row in rows] == [
        ("order", "1002", "1002", True),
        ("amount", "42.00 USD", "4.20 USD", False),
        ("card", "hidden", "hidden", True),
        ("currency", "USD", "", None),
        ("status", "", "settled", None),
    ]


def test_where_nothing_was_seen_nothing_is_said_to_be_the_same():
    rows = case_wording.comparison(operation(), SPEC, hidden=(), seen=None, judged={"order": "equal"})
    assert {row.same for row in rows} == {None}


def test_every_state_has_a_glyph_and_a_word():
    labels = [wording.state_label(state) for state in State] + [wording.run_label(state) for state in RunState]
    assert all(label.glyph and label.word for label in labels)
    assert wording.state_label("ambiguous", escalated=True).word == "escalated"


def test_the_reason_codes_that_the_ledger_writes_have_sentences():
    """Every code in the sources that ends an attempt, a look-up or a press."""
    import re
    from pathlib import Path

    sources = "".join(path.read_text() for path in Path(wording.__file__).parent.glob("*.py"))
    codes = set(re.findall(r"(?:reason_code|escalation_reason)\"?[:=] ?\"([a-z_]+)\"", sources))
    codes |= set(re.findall(r"(?:fact\(|reason=|escalate=|_look_again\(evidence, |code=)\"([a-z_]+)\"", sources))
    assert len(codes) > 25
    assert codes - set(wording.REASONS) == set()


def test_some_words_are_never_used():
    from pathlib import Path

    root = Path(wording.__file__).resolve().parent.parent
    texts = [*root.glob("reconciliation/*wording.py"), *root.glob("templates/**/*.html"), *root.glob("console/**/*.py")]
    for path in texts:
        words = path.read_text().lower()
        assert "successfully" not in words, path
        if path.suffix == ".html":
            assert "rollback" not in words, path


def test_journal_entries_are_told_in_sentences():
    assert case_wording.observed(entry("finding", verdict="found", source="by_key", provider_operation_id="re_1"))[
        1
    ] == ("Look-up by key: found (re_1).")
    assert case_wording.observed(entry("no_answer", error_class="unknown", sentence="connection reset"))[1] == (
        "Attempt 1: no answer that proves anything (no answer). Connection reset."
    )
    assert case_wording.observed(entry("something_new"))[1] == "Something new."


@pytest.mark.parametrize("code", [*HELD_BACK, "limited"])
def test_what_held_a_claim_back_is_told_in_a_sentence_of_its_own(code):
    told = case_wording.observed(entry("held_back", code=code))[1]
    assert re.fullmatch(r"A claim was held back\. [A-Z][^.]*\.", told), told


def test_what_a_restored_ledger_has_forgotten_is_not_said_to_have_been_sent():
    forgotten = [entry("restored", was="ready")]
    assert case_wording.lede(operation(), forgotten, clock=at).startswith(
        "No send is on record; it may have been sent in the time that this ledger has lost."
    )
    assert case_wording.dispatch(operation(), forgotten).title == "May have been sent"
    assert case_wording.known(operation(), forgotten, None, now=NOW)[0] == "May have been sent"


def test_the_timeline_says_once_that_the_ledger_was_restored():
    seen = case_wording.observed(entry("restored", was="ready"))[1]
    assert (seen, wording.reason("restored")) == (
        "Attempt 1 may have been sent in the time that this ledger has lost.",
        "the ledger was restored from a backup",
    )


def test_what_was_sent_before_a_restore_stays_said():
    again, second = operation(attempts=2, unknown_attempts=[1, 2]), entry("restored", was="ambiguous")
    second.attempt = 2
    assert case_wording.lede(again, [second], clock=at).startswith(
        "Sent at 14:03:00, and perhaps again in the time that this ledger has lost."
    )
    assert case_wording.dispatch(again, [second]).title == "Sent, no answer"


def test_a_broken_journal_entry_breaks_no_page():
    broken = JournalEntry(kind="finding", data="{not json", at=NOW)
    assert case_wording.facts(broken) == {}
    assert case_wording.observed(broken)[1].startswith("Look-up")


# Characters that lie


@pytest.mark.parametrize(
    "character", ["\u202e", "\u2066", "\u200b", "\u00ad", "\ufeff", "\x00", "\x1b", "\u2028", "\u3164"]
)
def test_a_character_that_hides_or_turns_is_shown_as_its_code_point(character):
    assert seen(f"a{character}b") == f'a<span class="cp">U+{ord(character):04X}</span>b'
    assert seen_plain(f"a{character}b") == f"a[U+{ord(character):04X}]b"


def test_other_scripts_and_markup_come_out_as_they_are():
    assert seen("Zürich, 東京, שלום, <b>&") == "Zürich, 東京, שלום, &lt;b&gt;&amp;"
    assert seen(None) == ""
    assert seen("one\ntwo") == 'one<span class="cp">↵</span>\ntwo'
