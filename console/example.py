"""The example's people. Only `manage.py start` in example mode calls prepare(); see also views/example.py."""

from django.conf import settings
from django.contrib.auth.models import User

from console import access, sign_in
from console.models import Role, Tenant
from reconciliation.actions import Actor

TENANTS = ("acme", "beta")
PEOPLE = {
    "op_ann": Role.OPERATOR,
    "op_bob": Role.OPERATOR,
    "ap_cleo": Role.APPROVER,
    "au_dan": Role.AUDITOR,
    "vi_eve": Role.VIEWER,
    "ad_fay": Role.ADMIN,
}
FIRST = "op_ann"
_SYSTEM = Actor(id="system:example", kind="system")


def prepare() -> None:
    """Make the example's tenants and people where they are missing; nobody gets a password. Safe to repeat."""
    tenants = [Tenant.objects.get_or_create(slug=slug)[0] for slug in TENANTS]
    for name, role in PEOPLE.items():
        user, made = User.objects.get_or_create(username=name)
        if made:
            user.set_unusable_password()
            user.save()
        for tenant in tenants:
            access.set_role(user=user, tenant=tenant, role=role, by=_SYSTEM, reason="example data")


def sign_in_link() -> str:
    """The address of a one-time link that lets the reader in as the example's first operator."""
    return settings.AFTERCALL_URL + sign_in.make_link(User.objects.get(username=FIRST))
