"""Tenants, roles and permissions: the one place that decides what a signed-in person may see and do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from allauth.account.models import EmailAddress
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.db import models, transaction
from django.http import Http404, HttpRequest

from audit import log
from console.models import Membership, Role, Tenant
from reconciliation.actions import Actor, Permission
from reconciliation.models import Approval, Job, Operation, Run

_VIEW = {Permission.VIEW, Permission.VIEW_HEALTH}
_ACT = {
    Permission.LOOK_UP,
    Permission.RESOLVE,
    Permission.RETRY,
    Permission.TERMINATE,
    Permission.WITHDRAW,
    Permission.RESUME,
    Permission.CANCEL,
    Permission.COMPENSATE,
    Permission.SCHEDULE,
    Permission.STOP,
}
_ROLES: dict[str, frozenset[Permission]] = {
    Role.VIEWER: frozenset(_VIEW),
    Role.OPERATOR: frozenset(_VIEW | _ACT | {Permission.VIEW_AUDIT}),
    Role.APPROVER: frozenset(_VIEW | {Permission.VIEW_AUDIT, Permission.APPROVE, Permission.SEND_AGAIN}),
    Role.AUDITOR: frozenset(_VIEW | {Permission.VIEW_AUDIT, Permission.EXPORT_AUDIT}),
    Role.ADMIN: frozenset(Permission),
}
EVERYWHERE = ":all"  # the tenant of what touches all of them
# One text for "not there" and "not yours", so that an outsider learns nothing.
NOT_FOUND = "There is nothing here under this number that you may see."
NEEDED: dict[str, str] = {
    Permission.VIEW_AUDIT: "Reading the audit log needs the role operator, approver, auditor or admin.",
    Permission.EXPORT_AUDIT: "Exporting the audit log needs the role auditor or admin.",
    Permission.RELEASE: "Releasing a restored ledger needs the role admin in every tenant.",
    Permission.SCHEDULE: "Changing schedules needs the role operator or admin.",
    Permission.VIEW_HEALTH: "The health page needs a role in at least one tenant.",
}


def permissions(role: str) -> frozenset[Permission]:
    """What a role allows; an unknown role allows nothing."""
    return _ROLES.get(role, frozenset())


def roles_that_may(permission: Permission) -> list[str]:
    """The roles that allow it, the least one first."""
    return [str(role) for role in Role if permission in permissions(role)]


def roles_of(request: HttpRequest) -> dict[str, str]:
    """Tenant slug -> role of the signed-in person, read once a request."""
    known: dict[str, str] | None = getattr(request, "_roles", None)
    if known is None:
        known = dict(_memberships(request.user)) if request.user.is_authenticated else {}
        request._roles = known  # type: ignore[attr-defined]
    return known


def _memberships(user: User) -> Iterable[tuple[str, str]]:
    return Membership.objects.filter(user=user).order_by("tenant__slug").values_list("tenant__slug", "role")


def tenants_of(request: HttpRequest, permission: Permission = Permission.VIEW) -> list[str]:
    """The tenants in which the signed-in person has the permission, by name."""
    return [slug for slug, role in roles_of(request).items() if permission in permissions(role)]


def actor_for(request: HttpRequest, tenant: str) -> Actor:
    """The signed-in person with what their role in `tenant` allows; nothing where they have none."""
    if tenant == EVERYWHERE:
        return actor_for_all(request)
    return actor_of(request.user, role=roles_of(request).get(tenant, ""))


def places_of(request: HttpRequest, permission: Permission = Permission.VIEW) -> list[str]:
    """The same, and EVERYWHERE for who has the permission in every tenant."""
    everywhere = permission in actor_for_all(request).permissions
    return [*tenants_of(request, permission), *([EVERYWHERE] if everywhere else [])]


def actor_for_all(request: HttpRequest) -> Actor:
    """The signed-in person with what they may do in every tenant that there is: for what touches all of them."""
    roles = roles_of(request)
    held = [permissions(roles.get(slug, "")) for slug in Tenant.objects.values_list("slug", flat=True)]
    everywhere = frozenset.intersection(*held) if held else frozenset()
    return replace(actor_of(request.user, role=""), permissions=everywhere)


def actor_of(user: User | AnonymousUser, *, role: str) -> Actor:
    """A person in a role."""
    return Actor(
        id=f"person:{user.pk}",
        kind="person",
        name=user.get_username(),
        emails=_emails_of(user),
        permissions=permissions(role),
    )


def _emails_of(user: User | AnonymousUser) -> tuple[str, ...]:
    """Every address that lets this person in, read once a request: an agent may act for them under any of these."""
    if not isinstance(user, User):
        return ()
    known: tuple[str, ...] | None = getattr(user, "_emails", None)
    if known is None:
        known = tuple(
            sorted({user.email, *EmailAddress.objects.filter(user=user).values_list("email", flat=True)} - {""})
        )
        user._emails = known  # type: ignore[attr-defined]
    return known


def fetch_operation(request: HttpRequest, pk: int, permission: Permission) -> tuple[Operation, Actor]:
    """Return the operation and who acts on it.

    Raises Http404 when it is missing or in a tenant of others, by the same query and with the same text, and
    PermissionDenied when the person's role in its tenant does not allow `permission`.
    """
    return _fetch(request, Operation.objects.select_related("run"), pk, permission)


def fetch_run(request: HttpRequest, pk: int, permission: Permission) -> tuple[Run, Actor]:
    """The same for a run."""
    return _fetch(request, Run.objects.all(), pk, permission)


def fetch_approval(request: HttpRequest, pk: int, permission: Permission) -> tuple[Approval, Actor]:
    """The same for a request for consent."""
    rows = Approval.objects.select_related("operation", "operation__run", "run", "limit", "job", "replaces")
    return _fetch(request, rows, pk, permission, tenants=places_of(request))


def fetch_job(request: HttpRequest, pk: int, permission: Permission) -> tuple[Job, Actor]:
    """The same for a schedule."""
    return _fetch(request, Job.objects.all(), pk, permission)


def _fetch(
    request: HttpRequest,
    rows: models.QuerySet[Any],
    pk: int,
    permission: Permission,
    *,
    tenants: list[str] | None = None,
) -> tuple[Any, Actor]:
    row = rows.filter(pk=pk, tenant__in=tenants_of(request) if tenants is None else tenants).first()
    if row is None:
        raise Http404(NOT_FOUND)
    actor = actor_for(request, row.tenant)
    if permission not in actor.permissions:
        raise PermissionDenied(NEEDED.get(permission, "Your role does not allow this."))
    return row, actor


def require(request: HttpRequest, permission: Permission) -> list[str]:
    """The tenants in which the person has the permission. Raises PermissionDenied where there is none."""
    tenants = tenants_of(request, permission)
    if not tenants:
        raise PermissionDenied(NEEDED.get(permission, "You have no role in any tenant; ask an administrator for one."))
    return tenants


def set_role(*, user: User, tenant: Tenant, role: str | None, by: Actor, reason: str = "") -> None:
    """Give, change or (None) take away a person's role, and audit it. A role that is held already changes nothing."""
    if role is not None and role not in Role.values:
        raise ValueError(f"{role!r} is no role; there are {', '.join(Role.values)}.")
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=tenant.pk)  # two changes of one person take turns
        before = Membership.objects.filter(user=user, tenant=tenant).first()
        if (before.role if before else None) == role:
            return
        _write(user, tenant, role)
        log.append(
            subject=f"access:{user.pk}",
            tenant=tenant.slug,
            event="access",
            from_state=before.role if before else None,
            to_state=role,
            fact=_fact(by, reason),
        )


def _write(user: User, tenant: Tenant, role: str | None) -> None:
    if role is None:
        Membership.objects.filter(user=user, tenant=tenant).delete()
    else:
        Membership.objects.update_or_create(user=user, tenant=tenant, defaults={"role": role})


def _fact(by: Actor, reason: str) -> log.Fact:
    return log.Fact(actor=by.id, actor_kind=by.kind, actor_name=by.name, reason_code="access_changed", reason=reason)
