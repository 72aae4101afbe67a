"""The address that commands print is the one that the console was started at."""

import pytest
from django.conf import settings as configured
from django.contrib.auth.models import User
from django.core.management import call_command

from console import address


@pytest.fixture(autouse=True)
def own_folder(settings, tmp_path, monkeypatch):
    settings.AFTERCALL_VAR = tmp_path
    monkeypatch.delenv("AFTERCALL_URL", raising=False)


def started_at(url, settings):
    settings.AFTERCALL_URL = url
    address.leave()
    settings.AFTERCALL_URL = "http://127.0.0.1:8000"  # what another shell without the variable has


def test_a_sign_in_link_leads_to_the_port_of_the_last_start(ledger_db, settings, capsys):
    User.objects.create_user("jo")
    started_at("http://127.0.0.1:8123", settings)
    call_command("sign_in_link", "jo")
    assert capsys.readouterr().out.startswith("http://127.0.0.1:8123/sign-in/")


def test_the_environment_is_believed_before_what_a_start_left(settings, monkeypatch):
    started_at("http://127.0.0.1:8123", settings)
    monkeypatch.setenv("AFTERCALL_URL", "https://aftercall.example.com")
    settings.AFTERCALL_URL = "https://aftercall.example.com"
    assert address.of_console() == "https://aftercall.example.com"


@pytest.mark.parametrize("left", [None, b"", b"\xff\xfe"], ids=["none", "empty", "unreadable"])
def test_without_a_readable_address_the_default_is_used(left, tmp_path):
    if left is not None:
        (tmp_path / "address").write_bytes(left)
    assert address.of_console() == configured.AFTERCALL_URL
