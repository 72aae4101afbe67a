"""Who acts: a person through the console or the API, or automation. The functions behind both are the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from audit.log import Fact


class Permission(StrEnum):
    """What a role may allow. `console/access.py` maps roles to these."""

    VIEW = "view"
    LOOK_UP = "look_up"
    RESOLVE = "resolve"
    RETRY = "retry"
    TERMINATE = "terminate"
    WITHDRAW = "withdraw"
    RESUME = "resume"
    CANCEL = "cancel"
    COMPENSATE = "compensate"
    STOP = "stop"
    RELEASE = "release"
    APPROVE = "approve"
    SEND_AGAIN = "send_again"
    SCHEDULE = "schedule"
    VIEW_AUDIT = "view_audit"
    EXPORT_AUDIT = "export_audit"
    VIEW_HEALTH = "view_health"


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who acts. `permissions` are those that hold in the subject's tenant."""

    id: str  # person:7, system:sweep, worker:w-3
    kind: str  # person | system | worker | agent
    name: str = ""
    emails: tuple[str, ...] = ()  # under which a person signs in as well
    permissions: frozenset[Permission] = frozenset()
    owners: tuple[str, ...] = ()  # of a token: the people who own it and who made it; they answer for it

    def may(self, permission: Permission) -> bool:
        """Whether the role allows it. Automation is allowed what the table allows."""
        return self.kind in ("system", "worker") or permission in self.permissions

    def fact(self, reason_code: str, *, reason: str = "", on_behalf_of: str = "", **details: object) -> Fact:
        """What the audit log records of a decision of this actor."""
        return Fact(
            actor=self.id,
            actor_kind=self.kind,
            actor_name=self.name,
            on_behalf_of=on_behalf_of or None,
            reason_code=reason_code,
            reason=reason,
            details=details,
        )


SYSTEM = Actor(id="system:sweep", kind="system")
