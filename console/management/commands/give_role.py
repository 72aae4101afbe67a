"""Gives a person a role in a tenant, or takes it away; makes both where they are missing. Every change is audited."""

import getpass
from typing import Any

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from console import access
from console.models import Role, Tenant
from reconciliation.actors import Actor

NONE = "none"


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="the person's user name; made without a password where it is new")
        parser.add_argument("tenant", help="small letters, digits and _ . : -, such as acme")
        parser.add_argument("role", choices=[*Role.values, NONE], help="what the person is there; none takes it away")
        parser.add_argument("--reason", default="", help="for the audit log")

    def handle(self, *args: Any, name: str, tenant: str, role: str, reason: str, **options: Any) -> None:
        by = Actor(id=f"system:command:{getpass.getuser()}", kind="system")
        wanted = None if role == NONE else role
        place = _tenant(tenant)  # first, for it may be refused
        access.set_role(user=_person(name), tenant=place, role=wanted, by=by, reason=reason)
        self.stdout.write(f"{name} is {role if wanted else 'nothing'} in {tenant}.")
        if wanted:
            self.stdout.write(f"`manage.py sign_in_link {name}` lets them in once; `changepassword` sets a password.")


def _person(name: str) -> User:
    user, made = User.objects.get_or_create(username=name)
    if made:
        user.set_unusable_password()
        user.save()
    return user


def _tenant(slug: str) -> Tenant:
    tenant = Tenant(slug=slug)
    try:
        tenant.validate_constraints()
    except ValidationError:
        raise CommandError(f"{slug!r} is no name of a tenant: small letters, digits and _ . : - only.") from None
    return Tenant.objects.get_or_create(slug=slug)[0]
