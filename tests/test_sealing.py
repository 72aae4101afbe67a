"""Sealed fields: a key opens what it sealed, also in the older form, and nothing else does."""

from __future__ import annotations

import pytest
from cryptography.fernet import Fernet

from reconciliation import sealing

OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()


def test_two_seals_of_one_value_differ_and_both_open(settings):
    settings.AFTERCALL_SEAL_KEYS = [NEW]
    first, second = sealing.seal({"note": "wet box"}), sealing.seal({"note": "wet box"})
    assert first != second
    assert sealing.open_bytes(first) == sealing.open_bytes(second) == b'{"note":"wet box"}'
    assert "wet" not in first


def test_a_rotated_key_still_opens_what_it_sealed_and_the_new_one_seals(settings):
    settings.AFTERCALL_SEAL_KEYS = [OLD]
    token = sealing.seal_bytes(b"x")
    settings.AFTERCALL_SEAL_KEYS = [NEW, OLD]
    assert sealing.open_bytes(token) == b"x"
    again = sealing.seal_bytes(b"y")
    settings.AFTERCALL_SEAL_KEYS = [NEW]
    assert sealing.open_bytes(again) == b"y"


def test_a_token_of_the_older_form_is_opened(settings):
    settings.AFTERCALL_SEAL_KEYS = [NEW, OLD]
    assert sealing.open_bytes(Fernet(OLD).encrypt(b"before")) == b"before"


@pytest.mark.parametrize("wrong", ["2.", "2.AAAA", "2.%%", "gAAAAA", "", "2." + "A" * 80])
def test_what_no_key_opens_says_which_setting_to_mend(settings, wrong):
    settings.AFTERCALL_SEAL_KEYS = [NEW]
    with pytest.raises(sealing.CannotOpen, match="AFTERCALL_SEAL_KEYS"):
        sealing.open_bytes(wrong)


def test_a_token_with_one_bit_changed_does_not_open(settings):
    settings.AFTERCALL_SEAL_KEYS = [NEW]
    token = sealing.seal_bytes(b"amount 4200")
    changed = token[:30] + ("A" if token[30] != "A" else "B") + token[31:]
    with pytest.raises(sealing.CannotOpen):
        sealing.open_bytes(changed)
