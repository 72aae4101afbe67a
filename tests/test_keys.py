"""Identity to key, request to fingerprint."""

import hashlib
import json
from decimal import Decimal

import pytest

from reconciliation import keys
from reconciliation.keys import InvalidField, canonical, parse
from tests.scripted import identity

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def fixed_secret(settings):
    settings.AFTERCALL_KEY_SECRET = SECRET


def key(**parts):
    return keys.operation_key(identity(**parts))


def fingerprint(request, **changes):
    whole = {"provider": "pay", "account": "main", "action": "refund.create", "request": request, **changes}
    return keys.fingerprint(**whole)


# RFC 8785


@pytest.mark.case("B1")
@pytest.mark.parametrize(
    ("written", "form"),
    [
        ('{"amount":12345.0}', '{"amount":12345}'),
        ("1e6", "1000000"),
        ("4.50", "4.5"),
        ("-0.0", "0"),
        ("1E30", "1e+30"),
        ("1e20", "100000000000000000000"),
        ("1e21", "1e+21"),
        ("0.000001", "0.000001"),
        ("1e-7", "1e-7"),
    ],
)
def test_one_number_has_one_form_however_it_was_written(written, form):
    assert canonical(parse(written)) == form.encode()


@pytest.mark.case("B1")
@pytest.mark.parametrize(
    "order", [("amount", "currency", "to"), ("to", "amount", "currency"), ("currency", "to", "amount")]
)
def test_the_order_of_members_and_white_space_change_nothing(order):
    values = {"amount": 1200, "currency": "usd", "to": "acct_7"}
    text = json.dumps({name: values[name] for name in order}, indent=3)
    digest = hashlib.sha256(canonical(parse(text))).hexdigest()
    assert digest == "9a2677e3cb147382f3085b9b2a96209c1ad0bb673bed872e4c1dde96b61191b7"


@pytest.mark.case("B1")
@pytest.mark.parametrize("values", [(1, "1", True), ([], {}, "", None)])
def test_values_of_different_kinds_have_different_fingerprints(values):
    assert len({fingerprint({"v": value}) for value in values}) == len(values)


@pytest.mark.case("B1")
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", '{"a":[NaN]}'])
def test_what_is_not_a_number_is_refused(text):
    with pytest.raises(InvalidField, match="which JSON has no form for"):
        parse(text)


@pytest.mark.case("B1")
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**53, -(2**53), "\ud800", Decimal("1.1"), {1: 2}, {"a": {1, 2}}]
)
def test_what_json_cannot_hold_exactly_is_refused_and_names_its_field(value):
    with pytest.raises(InvalidField, match=r"^request: "):
        canonical({"v": value})


@pytest.mark.case("B1")
@pytest.mark.parametrize("text", ['{"amount":1,"amount":100}', '{"lines":[{"a":1,"a":1}]}'])
def test_a_member_that_comes_twice_is_refused_not_chosen_from(text):
    with pytest.raises(InvalidField, match="twice"):
        parse(text)


@pytest.mark.parametrize("text", ["", "{", '{"a":1}x', "[" * 100_000, b"\xff"])
def test_what_is_not_json_is_refused_in_one_sentence(text):
    with pytest.raises(InvalidField, match="is not JSON"):
        parse(text)


def test_the_official_sample_of_rfc_8785_comes_out_byte_for_byte():
    sample = r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
    expected = (
        b'{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        b'"string":"\xe2\x82\xac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    assert canonical(parse(sample)) == expected


def test_members_are_sorted_by_utf_16_as_the_rfc_says():
    assert canonical({"\ufb33": 1, "\U0001f600": 2, "\u20ac": 3}) == '{"€":3,"😀":2,"\ufb33":1}'.encode()


@pytest.mark.case("B4")
def test_free_text_is_never_rewritten():
    assert canonical({"body": "A\u030a"}) == b'{"body":"A\xcc\x8a"}'
    assert fingerprint({"body": "A\u030a"}) != fingerprint({"body": "\u00c5"})


@pytest.mark.case("B5")
def test_a_null_member_is_not_a_missing_one():
    digests = [hashlib.sha256(canonical(v)).hexdigest()[:8] for v in ({"a": 1, "b": None}, {"a": 1})]
    assert digests == ["46e0ff59", "015abd7f"]
    assert fingerprint({"a": 1, "b": None}) != fingerprint({"a": 1})


# Identity


@pytest.mark.case("B4")
@pytest.mark.parametrize("name", ["workflow_type", "workflow_id", "step", "business_object"])
@pytest.mark.parametrize("spelling", ["Cafe\u0301-7", "A\u030a", "\u212b"])
def test_an_identity_that_is_not_in_nfc_is_refused(name, spelling):
    with pytest.raises(InvalidField, match=f"^{name}: is not in Unicode NFC"):
        identity(**{name: spelling})


@pytest.mark.case("B4")
def test_an_identity_in_nfc_is_taken_as_it_is():
    assert identity(business_object="Caf\u00e9-7").business_object == "Caf\u00e9-7"


@pytest.mark.case("B5")
@pytest.mark.parametrize("name", ["tenant", "workflow_type", "workflow_id", "step", "business_object"])
@pytest.mark.parametrize("nothing", [None, "", "   ", "\u200b", {}, {"order": None, "user": None}, [], 1.5])
def test_an_identity_without_a_part_is_refused_and_the_part_is_named(name, nothing):
    with pytest.raises(InvalidField) as refused:
        identity(**{name: nothing})
    assert refused.value.field == name


@pytest.mark.case("B5")
def test_zero_and_false_are_values_of_their_own():
    assert len({key(business_object=value) for value in (0, False, "0", "False", 1, True, "1")}) == 7


@pytest.mark.parametrize("version", [0, -1, True, "1", None, 1.0, 2**31])
def test_an_intent_version_is_a_whole_number_from_one(version):
    with pytest.raises(InvalidField, match=r"^intent_version: "):
        identity(intent_version=version)


@pytest.mark.parametrize("value", ["a\nb", "a\x00b", "\ud800", "x" * 201, 2**53])
def test_an_identity_that_could_not_be_stored_or_shown_is_refused(value):
    with pytest.raises(InvalidField, match=r"^business_object: "):
        identity(business_object=value)


# Keys


def test_the_key_of_an_identity_is_the_same_for_ever():
    """A golden vector: a change here would send every open operation under a second key."""
    assert key() == "ac1-3a6e0146ced9323209d1d53326ebc271c665c9ae8f3a3754d41b807e290083f7"


@pytest.mark.case("A7")
def test_a_new_intent_version_has_a_new_key_in_the_same_lineage():
    first, second = identity(), identity(intent_version=2)
    assert keys.operation_key(first) != keys.operation_key(second)
    assert keys.lineage_hash(first) == keys.lineage_hash(second)


@pytest.mark.case("B6")
def test_two_tenants_with_the_same_names_have_two_keys_and_two_lineages():
    acme, beta = identity(tenant="acme"), identity(tenant="beta")
    assert keys.operation_key(acme) != keys.operation_key(beta)
    assert keys.lineage_hash(acme) != keys.lineage_hash(beta)


@pytest.mark.case("B6")
def test_no_delimiter_in_a_name_makes_two_identities_one():
    assert key(tenant="acme:eu", workflow_type="pay") != key(tenant="acme", workflow_type="eu:pay")
    assert key(workflow_id='1","step":"x', step="y") != key(workflow_id="1", step='x","y')


def test_another_secret_gives_other_keys_and_fingerprints(settings):
    before = key(), fingerprint({"pin": "1234"})
    settings.AFTERCALL_KEY_SECRET = b"another secret of at least 32 by"
    assert not set(before) & {key(), fingerprint({"pin": "1234"})}


def test_a_fingerprint_is_no_plain_hash_of_the_request():
    whole = {"account": "main", "action": "refund.create", "provider": "pay", "request": {"pin": "1234"}}
    assert hashlib.sha256(canonical(whole)).hexdigest() not in fingerprint({"pin": "1234"})


def test_a_key_is_no_fingerprint_even_of_the_same_bytes():
    assert keys._keyed("operation key", b"x") != keys._keyed("fingerprint", b"x")


# Fingerprints


@pytest.mark.parametrize("change", [{"provider": "other"}, {"account": "other"}, {"action": "other"}])
def test_provider_account_and_action_are_part_of_the_fingerprint(change):
    assert fingerprint({"amount": 1}) != fingerprint({"amount": 1}, **change)


@pytest.mark.case("B8")
def test_declared_volatile_fields_are_left_out_of_the_fingerprint_and_no_others():
    first = {"amount": 1, "client_attempt_id": "a", "sent_at": "1", "ciphertext": "x"}
    again = {"amount": 1, "client_attempt_id": "b", "sent_at": "2", "ciphertext": "y"}
    volatile = ("client_attempt_id", "sent_at", "ciphertext")
    assert fingerprint(first, volatile=volatile) == fingerprint(again, volatile=volatile)
    assert fingerprint(first) != fingerprint(again)
    assert fingerprint(first, volatile=volatile) != fingerprint({**again, "amount": 2}, volatile=volatile)
