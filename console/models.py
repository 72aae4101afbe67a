"""Who may see and do what, and the links that let a person in once."""

from django.conf import settings
from django.db import models


class Tenant(models.Model):
    """One owner of operations. The ledger knows it by its slug alone."""

    slug = models.CharField(max_length=64, unique=True, db_collation="C")

    class Meta:
        constraints = [
            # The form that the ledger and the audit log accept.
            models.CheckConstraint(condition=models.Q(slug__regex=r"^[a-z0-9_.:-]{1,64}$"), name="tenant_slug_form")
        ]

    def __str__(self) -> str:
        return self.slug


class Role(models.TextChoices):
    """What a person is in a tenant. `access.permissions()` says what that allows."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    APPROVER = "approver"
    AUDITOR = "auditor"
    ADMIN = "admin"


class Membership(models.Model):
    """One person's role in one tenant. Written by `access.py` alone, which audits every change."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role.choices)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "tenant"], name="membership_once"),
            models.CheckConstraint(condition=models.Q(role__in=Role.values), name="membership_role_known"),
        ]

    def __str__(self) -> str:
        return f"{self.user_id} is {self.role} in {self.tenant_id}"


class SignInLink(models.Model):
    """A link that signs one person in, once, for a short time. Only the hash of its token is kept."""

    token_hash = models.CharField(max_length=64, unique=True)  # SHA-256 in hex
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"link {self.pk} for {self.user_id}"
