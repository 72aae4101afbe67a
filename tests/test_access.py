"""Who gets in, who sees what, and what is kept of changes of access."""

import json

import pytest
from allauth.account.models import EmailAddress
from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.core.management import CommandError, call_command
from django.http import Http404
from django.test import Client, RequestFactory

from audit.models import Entry
from console import access, example, sign_in
from console.models import Membership, SignInLink, Tenant
from reconciliation import consent
from reconciliation.actions import Permission
from tests import cast

ACTING = {"look_up", "resolve", "retry", "terminate", "withdraw", "resume"}


def asked_by(user):
    request = RequestFactory().get("/")
    request.user = user
    return request


@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [
        ("viewer", {"view", "view_health"}, ACTING | {"view_audit", "export_audit", "approve", "send_again"}),
        ("operator", ACTING | {"view", "view_audit"}, {"approve", "send_again", "export_audit"}),
        ("approver", {"approve", "view", "view_audit"}, ACTING | {"export_audit"}),
        ("auditor", {"view_audit", "export_audit"}, ACTING | {"approve", "send_again"}),
        ("admin", {str(permission) for permission in Permission}, set()),
        ("emperor", set(), {str(permission) for permission in Permission}),
    ],
)
def test_a_role_allows_this_and_not_that(role, may, may_not):
    allowed = access.permissions(role)
    assert may <= allowed
    assert not may_not & allowed


def test_an_outsider_cannot_tell_a_row_of_others_from_a_missing_one(ledger_db):
    who = cast.people()
    mine = cast.operation()
    stranger = cast.client(who["out_zoe"])
    theirs, missing = stranger.get(f"/operations/{mine.pk}"), stranger.get(f"/operations/{mine.pk + 1000}")
    assert theirs.status_code == missing.status_code == 404
    assert lines_of(theirs) == lines_of(missing)


def lines_of(response):
    """A page without what differs by chance."""
    return [line for line in response.content.decode().splitlines() if "csrfmiddlewaretoken" not in line]


def test_a_row_of_others_and_a_missing_one_cost_the_same_queries(ledger_db, django_assert_num_queries):
    who = cast.people()
    mine = cast.operation()
    for pk in (mine.pk, mine.pk + 1000):
        request = asked_by(who["out_zoe"])
        with django_assert_num_queries(2), pytest.raises(Http404, match="nothing here"):
            access.fetch_operation(request, pk, Permission.VIEW)


def test_a_member_without_the_permission_is_told_so(ledger_db):
    who = cast.people()
    mine = cast.operation()
    with pytest.raises(PermissionDenied):
        access.fetch_operation(asked_by(who["vi_eve"]), mine.pk, Permission.RETRY)
    found, actor = access.fetch_operation(asked_by(who["op_ann"]), mine.pk, Permission.RETRY)
    assert found == mine
    assert (actor.id, actor.name) == (f"person:{who['op_ann'].pk}", "op_ann")


def test_a_change_of_access_is_on_record_with_who_and_from_what_to_what(ledger_db):
    who = cast.people()
    boss, eve, acme = cast.actor(who["op_ann"], "admin"), who["vi_eve"], Tenant.objects.get(slug="t_acme")
    access.set_role(user=eve, tenant=acme, role="operator", by=boss, reason="on call from today")
    access.set_role(user=eve, tenant=acme, role="operator", by=boss, reason="twice is once")
    access.set_role(user=eve, tenant=acme, role=None, by=boss, reason="left")
    kept = list(Entry.objects.filter(subject=f"access:{eve.pk}").order_by("seq"))
    assert [(entry.from_state, entry.to_state) for entry in kept] == [
        (None, "viewer"),
        ("viewer", "operator"),
        ("operator", None),
    ]
    assert kept[1].actor == boss.id
    assert kept[1].openings.get(field="reason").value == "on call from today"
    assert b"on call" not in bytes(kept[1].canonical)
    assert json.loads(bytes(kept[1].canonical))["subject"] == f"access:{eve.pk}"
    assert not Membership.objects.filter(user=eve).exists()


def test_a_role_that_does_not_exist_is_refused(ledger_db):
    who = cast.people()
    with pytest.raises(ValueError, match="no role"):
        access.set_role(user=who["vi_eve"], tenant=Tenant.objects.first(), role="emperor", by=cast.SETTER)


# Coming in


def test_pages_ask_for_sign_in_first(ledger_db):
    for path in ("/", "/operations/1", "/runs", "/runs/1", "/audit", "/audit/1", "/audit/export", "/health"):
        answer = Client().get(path)
        assert (answer.status_code, answer.headers["Location"]) == (302, f"/accounts/login/?next={path}")


def test_a_password_lets_in_and_a_wrong_one_does_not(ledger_db):
    cast.people()
    browser = Client()
    refused = browser.post("/accounts/login/", {"login": "op_ann", "password": "wrong"})
    assert refused.status_code == 200
    assert b"not correct" in refused.content
    let_in = browser.post("/accounts/login/", {"login": "op_ann", "password": cast.PASSWORD})
    assert (let_in.status_code, let_in.headers["Location"]) == (302, "/")
    assert b"op_ann" in browser.get("/").content


def test_a_person_is_known_by_every_address_that_lets_them_in(ledger_db):
    ann = cast.people()["op_ann"]
    ann.email = "Ann@x.org"
    ann.save()
    EmailAddress.objects.create(user=ann, email="ann.b@x.org")
    known = consent.names(access.actor_of(ann, role="operator"))
    assert {"op_ann", "person:op_ann", "ann@x.org", "person:ann.b@x.org", f"person:{ann.pk}"} <= set(known)


def test_nobody_signs_up(ledger_db):
    answer = Client().post("/accounts/signup/", {"username": "mallory", "password1": "x" * 20, "password2": "x" * 20})
    assert b"Nobody signs up here" in answer.content
    assert not User.objects.filter(username="mallory").exists()


def test_looking_at_a_sign_in_link_does_not_use_it_up_and_pressing_does_once(ledger_db):
    who = cast.people()
    path = sign_in.make_link(who["op_ann"])
    for _ in range(3):
        assert b"Sign in to Aftercall" in Client().get(path).content
    first, second = Client(), Client()
    assert first.post(path).status_code == 302
    assert b"op_ann" in first.get("/").content
    late = second.post(path)
    assert late.status_code == 410
    assert b"lets nobody in" in late.content
    assert second.get("/").status_code == 302


def test_a_sign_in_link_ends_by_the_databases_clock(ledger_db, clock):
    who = cast.people()
    path = sign_in.make_link(who["op_ann"])
    clock.advance(minutes=31)
    assert Client().get(path).status_code == 410
    assert Client().post(path).status_code == 410


def test_the_token_of_a_sign_in_link_is_not_in_the_database(ledger_db):
    who = cast.people()
    token = sign_in.make_link(who["op_ann"]).rsplit("/", 1)[1]
    assert token not in str(SignInLink.objects.values().get())


def test_a_sign_in_link_asks_for_the_second_factor(ledger_db):
    from allauth.mfa.models import Authenticator
    from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret

    who = cast.people()
    TOTP.activate(who["op_ann"], generate_totp_secret())
    assert Authenticator.objects.count() == 1
    browser = Client()
    answer = browser.post(sign_in.make_link(who["op_ann"]))
    assert answer.headers["Location"].startswith("/accounts/2fa/authenticate/")
    assert browser.get("/").status_code == 302


def test_sign_out_ends_the_session(ledger_db):
    browser = cast.client(cast.people()["op_ann"])
    browser.post("/accounts/logout/")
    assert browser.get("/").status_code == 302


# The example


def test_the_example_makes_its_people_once(ledger_db):
    example.prepare()
    example.prepare()
    assert Membership.objects.count() == len(example.PEOPLE) * len(example.TENANTS)
    assert Entry.objects.filter(event="access").count() == len(example.PEOPLE) * len(example.TENANTS)
    assert not User.objects.get(username="op_ann").has_usable_password()
    path = "/" + example.sign_in_link().split("/", 3)[3]
    browser = Client()
    browser.post(path)
    assert b"op_ann" in browser.get("/").content


def test_the_switcher_works_in_the_example_alone(ledger_db, settings):
    example.prepare()
    browser = cast.client(User.objects.get(username="op_ann"))
    assert browser.post("/example/switch", {"person": "au_dan"}).status_code == 404
    assert b"example data" not in browser.get("/").content
    settings.AFTERCALL_EXAMPLE = True
    assert browser.post("/example/switch", {"person": "au_dan", "next": "/runs"}).headers["Location"] == "/runs"
    page = browser.get("/").content
    assert b"au_dan" in page
    assert b"example data" in page
    assert browser.post("/example/switch", {"person": "root"}).status_code == 404
    assert browser.post("/example/switch", {"person": "op_ann", "next": "//evil"}).headers["Location"] == "/"


def test_the_switcher_never_takes_a_person_from_outside_the_example(ledger_db, settings):
    example.prepare()
    settings.AFTERCALL_EXAMPLE = True
    real = User.objects.create_user("real")
    assert cast.client(real).post("/example/switch", {"person": "op_ann"}).status_code == 404


def test_a_page_never_allows_inline_script_or_style(ledger_db):
    page = cast.client(cast.people()["op_ann"]).get("/")
    policy = page.headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    text = page.content.decode()
    assert " style=" not in text
    assert " onclick" not in text
    assert "<style" not in text


def test_the_first_person_is_made_from_the_command_line(ledger_db, capsys):
    call_command("give_role", "jo", "acme", "operator", reason="the first of us")
    call_command("sign_in_link", "jo")
    link = capsys.readouterr().out.splitlines()[-1]
    browser = Client()
    browser.post(link.removeprefix(settings.AFTERCALL_URL))
    assert browser.get("/").status_code == 200
    entry = Entry.objects.get(event="access")
    assert (entry.tenant, entry.to_state, entry.actor.partition(":")[0]) == ("acme", "operator", "system")
    assert entry.openings.get(field="reason").value == "the first of us"


def test_a_role_is_taken_away_from_the_command_line(ledger_db):
    call_command("give_role", "jo", "acme", "operator")
    call_command("give_role", "jo", "acme", "none")
    assert not Membership.objects.exists()
    assert Entry.objects.filter(event="access").count() == 2


@pytest.mark.parametrize("slug", ["Acme", "a b", "", "ü", "a" * 65])
def test_a_tenant_that_no_ledger_would_take_is_not_made(ledger_db, slug):
    with pytest.raises(CommandError, match="is no name of a tenant"):
        call_command("give_role", "jo", slug, "viewer")
    assert not User.objects.exists()
