"""`manage.py setup_database` on a server that somebody else runs."""

import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest

from console import embedded, setup
from tests.database import VAR
from tests.test_start import ROOT, environ, free_port, refused

UNGUARDED = "auth_user"
GUARDED = ("audit_entry", "reconciliation_operation")


@pytest.fixture(scope="module")
def server():
    """A server with a database that the role `owner` owns; `weak` owns nothing."""
    data = Path(tempfile.mkdtemp(dir=VAR)) / "postgres"
    process = embedded.start(data)
    with psycopg.connect(embedded.url(data), autocommit=True) as superuser:
        superuser.execute("CREATE ROLE owner LOGIN CREATEROLE")
        superuser.execute("CREATE ROLE weak LOGIN")
        superuser.execute("CREATE DATABASE ledger OWNER owner")
    yield data
    embedded.stop(process)


def urls(server, *, app, owner):
    return {
        "DATABASE_URL": embedded.url(server, user=app, database="ledger"),
        "DATABASE_OWNER_URL": embedded.url(server, user=owner, database="ledger"),
    }


@pytest.mark.processes
def test_it_makes_the_application_role_and_leaves_it_no_more_than_it_needs(server, tmp_path):
    env = environ(AFTERCALL_VAR=str(tmp_path), **urls(server, app="app", owner="owner"))
    for _ in range(2):  # safe to repeat
        subprocess.run([sys.executable, "manage.py", "setup_database"], cwd=ROOT, env=env, check=True)
    with psycopg.connect(embedded.url(server, user="app", database="ledger"), autocommit=True) as app:
        app.execute(f"DELETE FROM {UNGUARDED}")
        for table in GUARDED:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                app.execute(f"DELETE FROM {table}")
        for statement in ("CREATE TABLE mine (id int)", "DELETE FROM django_migrations"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                app.execute(statement)


@pytest.mark.processes
def test_an_app_of_somebody_s_own_is_migrated_and_its_tables_are_granted(server, tmp_path):
    own = {"AFTERCALL_APPS": "tests.desk_app"}
    env = environ(AFTERCALL_VAR=str(tmp_path), **own, **urls(server, app="app", owner="owner"))
    subprocess.run([sys.executable, "manage.py", "setup_database"], cwd=ROOT, env=env, check=True)
    with psycopg.connect(embedded.url(server, user="app", database="ledger"), autocommit=True) as app:
        app.execute("INSERT INTO desk_app_outcome (order_id, outcome) VALUES ('1002', 'refunded')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            app.execute("DROP TABLE desk_app_outcome")


@pytest.mark.processes
def test_an_app_that_is_not_there_is_said(server, tmp_path):
    said = refused("--port", str(free_port()), AFTERCALL_VAR=str(tmp_path), AFTERCALL_APPS="desk_ap")
    assert "AFTERCALL_APPS names desk_ap, which Python does not find." in said


@pytest.mark.processes
def test_an_owner_that_owns_nothing_is_said(server, tmp_path):
    said = refused(
        "--port", str(free_port()), AFTERCALL_VAR=str(tmp_path), **urls(server, app="weak_app", owner="weak")
    )
    assert said.startswith("The role weak cannot bring the database into shape (permission denied")
    assert "let DATABASE_OWNER_URL name a role that owns the database" in said


@pytest.mark.processes
def test_migrating_as_the_application_is_refused(tmp_path):
    ended = subprocess.run(
        [sys.executable, "manage.py", "migrate", "--database", "default"],
        cwd=ROOT,
        env=environ(AFTERCALL_VAR=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "Only the owner role migrates" in ended.stderr


def test_ledger_and_audit_log_are_never_granted_wholesale():
    tables = setup.freely_used_tables()
    assert UNGUARDED in tables
    assert not [table for table in tables if table.startswith(("audit_", "reconciliation_"))]
