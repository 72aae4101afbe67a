"""The ground that every other test stands on."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import ProgrammingError, connection, connections


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_test_finds_nothing_of_the_one_before_it(ledger_db, turn):
    assert User.objects.count() == 0
    User.objects.create_user("olga")


def test_commits_are_real(ledger_db, superuser_connection):
    User.objects.create_user("olga")
    assert superuser_connection.execute("SELECT count(*) FROM auth_user").fetchone() == (1,)


def test_the_application_role_cannot_create_tables(ledger_db):
    with pytest.raises(ProgrammingError, match="permission denied"), connection.cursor() as cursor:
        cursor.execute("CREATE TABLE sneaked_in (id int)")


def test_application_and_owner_are_two_roles(ledger_db):
    names = []
    for alias in ("default", "owner"):
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT current_user")
            names.append(cursor.fetchone()[0])
    assert names == [settings.AFTERCALL_APP_ROLE, settings.AFTERCALL_OWNER_ROLE]
    assert len(set(names)) == 2


def test_the_clock_moves_and_is_set_right_again(ledger_db, clock):
    before = clock.now()
    assert abs(before - datetime.now(UTC)) < timedelta(seconds=5)
    assert clock.advance(hours=1) - before >= timedelta(hours=1)
    assert clock.set(datetime(2031, 1, 1, tzinfo=UTC)).year == 2031
    with connection.cursor() as cursor:
        cursor.execute("SELECT aftercall_now()")
        assert cursor.fetchone()[0].year == 2031


def test_a_child_process_works_on_the_same_database(ledger_db, database_url_env):
    User.objects.create_user("olga")
    code = "import django; django.setup(); from django.contrib.auth.models import User; print(User.objects.get())"
    child = subprocess.run([sys.executable, "-c", code], env=database_url_env, capture_output=True, text=True)
    assert child.stdout.strip() == "olga", child.stderr


@pytest.mark.filterwarnings("ignore:A session that a test left open")
def test_a_session_that_holds_locks_does_not_keep_its_rows(ledger_db, cleaner):
    left_open = ledger_db.superuser()
    left_open.execute("BEGIN")
    User.objects.create_user("olga")
    left_open.execute("SELECT * FROM auth_user FOR UPDATE")
    ledger_db.empty(cleaner)
    assert cleaner.execute("SELECT count(*) FROM auth_user").fetchone() == (0,)


def test_without_the_fixture_the_database_is_closed():
    with pytest.raises(RuntimeError, match="Database access not allowed"):
        User.objects.count()
