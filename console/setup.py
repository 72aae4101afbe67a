"""Brings a database into the shape that this version needs: roles, tables, rights."""

from collections.abc import Iterable
from typing import Any

import psycopg
from django.apps import AppConfig, apps
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from psycopg import sql

from console import embedded

# Ledger and audit log are missing on purpose: their migrations grant what the application may do to each table.
FREELY_USED = ("auth", "contenttypes", "sessions", "account", "mfa", "django_q", "console")


def set_up(*, verbosity: int = 0) -> None:
    """Create roles and database where this process can, migrate as the owner, grant. Safe to repeat."""
    if settings.AFTERCALL_DATABASE_EMBEDDED:
        with psycopg.connect(embedded.url(settings.AFTERCALL_VAR / "postgres"), autocommit=True) as superuser:
            create_roles(superuser)
            create_database(superuser, name=settings.DATABASES["default"]["NAME"])
    else:
        create_app_role()
    migrate_and_grant(verbosity=verbosity)


def migrate_and_grant(*, verbosity: int = 0) -> None:
    """Migrate as the owner and give the application role its rights."""
    call_command("migrate", database="owner", interactive=False, verbosity=verbosity)
    grant()


def create_roles(superuser: "psycopg.Connection[Any]", *, names: Iterable[str] | None = None) -> None:
    """Create the two roles where they are missing: both may log in, neither is a superuser."""
    for role in names or (settings.AFTERCALL_OWNER_ROLE, settings.AFTERCALL_APP_ROLE):
        if not superuser.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone():
            superuser.execute(sql.SQL("CREATE ROLE {} LOGIN NOSUPERUSER").format(sql.Identifier(role)))


def create_app_role() -> None:
    """Create the application role of DATABASE_URL through the owner's connection, where it is missing.

    Raises django.db.Error where the owner role may not create roles.
    """
    role, password = settings.AFTERCALL_APP_ROLE, settings.DATABASES["default"].get("PASSWORD") or None
    with connections["owner"].cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role])
        if not cursor.fetchone():
            statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
            cursor.execute(statement.format(sql.Identifier(role), sql.Literal(password)))


def create_database(superuser: "psycopg.Connection[Any]", *, name: str) -> None:
    """Create the database where it is missing, owned by the owner role."""
    if not superuser.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
        statement = sql.SQL("CREATE DATABASE {} OWNER {}")
        superuser.execute(
            statement.format(sql.Identifier(name), sql.Identifier(settings.AFTERCALL_OWNER_ROLE)),
        )


def grant() -> None:
    """Grant the application role its rights on the tables that hold neither ledger nor audit log."""
    role = sql.Identifier(settings.AFTERCALL_APP_ROLE)
    tables = sql.SQL(", ").join(sql.Identifier(table) for table in freely_used_tables())
    with connections["owner"].cursor() as cursor:
        cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(role))
        cursor.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO {}").format(tables, role))
        cursor.execute(sql.SQL("GRANT SELECT ON django_migrations TO {}").format(role))


def _apps_of_others() -> set[str]:
    """The modules of AFTERCALL_APPS, which may be named by an app or by its configuration class."""
    return {AppConfig.create(name).name for name in settings.AFTERCALL_APPS}


def freely_used_tables() -> list[str]:
    """Return the tables of the apps whose rows the application writes without a guard of ours."""
    labels = {*FREELY_USED, *(app.label for app in apps.get_app_configs() if app.name in _apps_of_others())}
    models = (
        model
        for label in labels
        for model in apps.get_app_config(label).get_models(include_auto_created=True)
        if model._meta.managed and not model._meta.proxy
    )
    return sorted({model._meta.db_table for model in models})
