"""The outbox: business code asks, in the transaction of its own writes, for something to be done outside.

    with transaction.atomic():
        order.ship()
        outbox.put(Intent(identity=..., provider="mail", action="message.send", request=...), actor=SHOP)

The message commits with those writes or not at all. A publisher (publishing.py) turns it into an ordinary operation of
the same identity, so that it is done once however often it is published. Inside a local effect it commits with effect
and settlement. This module is the one writer of the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connections, transaction
from django_q.models import OrmQ
from django_q.tasks import async_task

from audit import log
from audit.log import Fact
from audit.verify import Head

from . import consent, fence, keys, sealing, transition
from .actors import Actor
from .claims import Intent
from .keys import Identity, InvalidField
from .models import Message
from .policy import ErrorClass, RetryPolicy
from .providers.base import Json
from .states import MessageState
from .workflows import Consent

ALIAS = transition.ALIAS
LONGEST_TEXT = {"provider": 64, "action": 120, "requested_by": 120, "on_behalf_of": 120, "order": 200}


class MessageMismatch(Exception):
    """A known identity with something else asked for. The message that is there stays as it is."""


def put(intent: Intent, *, actor: Actor, order: str = "") -> int:
    """Ask for `intent` to be done once the open transaction has committed. Returns the message's id.

    The identity is the message's: asking twice for the same is one message. Messages of one tenant with the same
    `order` ("order-1002") are published in the order in which their transactions commit, each when the operation of the
    one before it is settled. For that, two transactions that put into one order wait for each other.

    Raises RuntimeError outside a transaction, InvalidField for what cannot be recorded, and MessageMismatch for a known
    identity with another request. Whether provider and action are configured is asked when it is published: a message
    must not fail the transaction of a process that does not know them.
    """
    connection = connections[ALIAS]
    if not connection.in_atomic_block:
        raise RuntimeError("outbox.put() belongs into the transaction of what it is about: use transaction.atomic()")
    row = _row(intent, actor=actor, order=order)
    with connection.cursor() as cursor:
        if order:
            # Ids are given before the commit; held until then, this makes their order that of the commits.
            lock = f"outbox:{intent.identity.tenant}:{order}"
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [lock])
        cursor.execute(_PUT, row)
        made = cursor.fetchone()
    pk = int(made[0]) if made else _known(row)
    wake_at_commit()
    return pk


_PUT = """
INSERT INTO reconciliation_message (tenant, workflow_type, workflow_id, step, business_object, intent_version,
    lineage, ordering, provider, action, fingerprint, request_sealed, terms, requested_by, on_behalf_of, intended_at,
    state, version, due_at, tries, problem, detail, created_at, changed_at)
SELECT %(tenant)s, %(workflow_type)s, %(workflow_id)s, %(step)s, %(business_object)s, %(intent_version)s,
    %(lineage)s, %(ordering)s, %(provider)s, %(action)s, %(fingerprint)s, %(request_sealed)s, %(terms)s,
    %(requested_by)s, %(on_behalf_of)s, coalesce(%(intended_at)s, now),
    'waiting', 0, now, 0, '', '', now, now
  FROM aftercall_now() AS now
ON CONFLICT (lineage, intent_version) DO NOTHING RETURNING id
"""


def _row(intent: Intent, *, actor: Actor, order: str) -> dict[str, Any]:
    identity = intent.identity
    if not isinstance(intent.request, dict):
        raise InvalidField("request", "must be a JSON object")
    by = intent.requested_by or actor.id
    texts = {"provider": intent.provider, "action": intent.action, "requested_by": by, "order": order}
    for name, value in (texts | {"on_behalf_of": intent.on_behalf_of}).items():
        _check_text(name, value)
    if intent.held is not None or intent.undo_of is not None or intent.run_id is not None:
        raise InvalidField("intent", "belongs to a run; a message is an operation by itself")
    asked = {"terms": _terms(intent, actor), "order": order, "request": intent.request}
    return {
        **identity.lineage,
        "business_object": json.dumps(identity.business_object, ensure_ascii=False),
        "intent_version": identity.intent_version,
        "lineage": keys.lineage_hash(identity),
        "ordering": order,
        "provider": intent.provider,
        "action": intent.action,
        "fingerprint": keys.fingerprint(provider=intent.provider, account="-", action=intent.action, request=asked),
        "request_sealed": sealing.seal(intent.request),
        "terms": json.dumps(asked["terms"], sort_keys=True),
        "requested_by": by,
        "on_behalf_of": intent.on_behalf_of,
        "intended_at": intent.intended_at,
    }


def _check_text(name: str, value: str) -> None:
    """What the database would refuse is refused before, for that would end the business's transaction."""
    least, most = (1 if name in ("provider", "action") else 0), LONGEST_TEXT[name]
    if not least <= len(value) <= most or "\0" in value or value != value.encode("utf-8", "replace").decode():
        raise InvalidField(name, f"must be text of {least} to {most} characters, no NUL, no half of a surrogate pair")


def _terms(intent: Intent, actor: Actor) -> Json:
    asks = consent.needed(intent.consent, intent.request)  # decided now: a rule is code, and does not wait in a table
    return {
        "retry": asdict(intent.retry) | {"never": sorted(intent.retry.never)} if intent.retry else None,
        "consent": json.loads(consent.text(intent.consent)) if asks and intent.consent else None,
        "spent_is_final": intent.spent_is_final,
        "owners": sorted({*intent.owners, *actor.owners}),
    }


def _known(row: Mapping[str, Any]) -> int:
    """In a statement of its own: the one before it waited for the other transaction, and did not see it."""
    known = Message.objects.get(lineage=row["lineage"], intent_version=row["intent_version"])
    if known.fingerprint != row["fingerprint"]:
        raise MessageMismatch(
            f"message {known.pk} asks for something else under this identity; raise intent_version for a new intent"
        )
    return known.pk


def intent_of(message: Message) -> Intent:
    """What a message asks for. Raises sealing.CannotOpen, and InvalidField where the row was changed by hand."""
    terms = json.loads(message.terms)
    retry, asks = terms["retry"], terms["consent"]
    return Intent(
        identity=Identity(
            tenant=message.tenant,
            workflow_type=message.workflow_type,
            workflow_id=message.workflow_id,
            step=message.step,
            business_object=json.loads(message.business_object),
            intent_version=message.intent_version,
        ),
        provider=message.provider,
        action=message.action,
        request=json.loads(sealing.open_bytes(message.request_sealed)),
        requested_by=message.requested_by,
        on_behalf_of=message.on_behalf_of,
        intended_at=_intended_at(message),
        retry=RetryPolicy(
            **{**retry, "intervals": tuple(retry["intervals"]), "never": frozenset(map(ErrorClass, retry["never"]))}
        )
        if retry
        else None,
        spent_is_final=terms["spent_is_final"],
        consent=Consent(
            policy=asks["policy"],
            expires_after=timedelta(seconds=asks["expires_after"]),
            use_within=timedelta(seconds=asks["use_within"]),
        )
        if asks
        else None,
        owners=tuple(terms["owners"]),
    )


def _intended_at(message: Message) -> datetime:
    """When it was meant, however late it is published: too old an intent is refused and not done.

    The moment of its transaction shows nothing after a restore: the lost time may have put the same identity and done
    it, and business code puts it anew because its table was restored too. Only what the caller stated shows it as new.
    """
    if message.intended_at != message.created_at:
        return message.intended_at
    return min(message.created_at, fence.replays_since() or message.created_at)


# The wake-up, which may be lost: the beat asks again


def wake_at_commit() -> None:
    """Wake a worker when the open transaction commits, once."""
    if not any(entry[1] is wake for entry in connections[ALIAS].run_on_commit):
        transaction.on_commit(wake, using=ALIAS, robust=True)


def wake() -> None:
    """Ask the queue for a drain, unless enough of them wait already."""
    if OrmQ.objects.count() < settings.Q_CLUSTER["workers"]:
        async_task("reconciliation.tasks.drain", group="drain")


# Which messages may be published now, and what becomes of them

# One whose predecessor in its order is still to be published, stuck, or not settled, waits behind it. Only the one just
# before it is asked for: that one went only when the one before it was settled.
PUBLISHABLE = """
d.state = 'waiting' AND d.due_at <= %(before)s AND (d.ordering = '' OR NOT EXISTS (
    SELECT 1 FROM (SELECT p.state, p.operation_id FROM reconciliation_message p WHERE p.tenant = d.tenant
                     AND p.ordering = d.ordering AND p.id < d.id ORDER BY p.id DESC LIMIT 1) AS p
      LEFT JOIN reconciliation_operation o ON o.id = p.operation_id
     WHERE p.state IN ('waiting', 'stuck') OR o.state NOT IN ('succeeded', 'failed_terminal', 'terminated')))
"""
_TAKE = f"""
UPDATE reconciliation_message m SET due_at = %(before)s + %(again)s * interval '1 second' WHERE m.id IN (
    SELECT d.id FROM reconciliation_message d WHERE {PUBLISHABLE}
     ORDER BY d.due_at, d.id LIMIT %(limit)s FOR NO KEY UPDATE OF d SKIP LOCKED) RETURNING m.id
"""  # noqa: S608 - of constants


def take(*, limit: int) -> list[int]:
    """Ids of messages to be published, each handed to one publisher; they come back should that one be lost."""
    with connections[ALIAS].cursor() as cursor:
        values: dict[str, Any] = {
            "before": transition.database_now(),
            "again": settings.AFTERCALL_TAKE_AGAIN,
            "limit": limit,
        }
        cursor.execute(_TAKE, values)
        return sorted(row[0] for row in cursor.fetchall())


def published(message: Message, *, operation: int) -> bool:
    """There is an operation for it, which holds the request from now on."""
    return _write(
        message,
        "state = 'published', operation_id = %(operation)s, due_at = NULL, request_sealed = '', problem = '',"
        " detail = '', changed_at = aftercall_now()",
        operation=operation,
    )


def later(message: Message, *, problem: str, detail: str, seconds: float) -> bool:
    """It could not be published now, and waiting may cure that."""
    return _write(
        message,
        "tries = tries + 1, problem = %(problem)s, detail = %(detail)s,"
        " due_at = aftercall_now() + %(seconds)s * interval '1 second'",
        problem=problem, detail=detail[:300], seconds=seconds,
    )  # fmt: skip


def stick(message: Message, *, problem: str, detail: str, fact: Fact) -> bool:
    """It cannot be published as it is: a person is called. Messages of no order, or of another, go on."""
    changes = "due_at = NULL, problem = %(problem)s, detail = %(detail)s"
    return _decide(message, MessageState.STUCK, changes, fact, problem=problem, detail=detail[:300])


def release(message: Message, *, fact: Fact) -> bool:
    """A person has it tried again."""
    return _decide(message, MessageState.WAITING, "due_at = aftercall_now(), tries = 0", fact)


def discard(message: Message, *, fact: Fact) -> bool:
    """A person said that it is not to be published."""
    return _decide(message, MessageState.DISCARDED, "due_at = NULL, request_sealed = ''", fact)


def _decide(message: Message, to: MessageState, changes: str, fact: Fact, **values: Any) -> bool:
    with transaction.atomic(using=ALIAS):
        changes = f"{changes}, state = %(to)s, version = version + 1, changed_at = aftercall_now()"
        if not _write(message, changes, to=to.value, **values):
            return False
        log.append(
            subject=message.subject, tenant=message.tenant, event="transition", fact=fact, from_state=message.state,
            to_state=to.value, version=message.version + 1,
        )  # fmt: skip
    return True


def _write(message: Message, changes: str, **values: Any) -> bool:
    """Only where it is still as it was read: another publisher, or a person, may have been there. Else False."""
    still = "id = %(id)s AND state = %(was)s AND version = %(seen)s"
    statement = f"UPDATE reconciliation_message SET {changes} WHERE {still}"  # noqa: S608 - of constants
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(statement, {**values, "id": message.pk, "was": message.state, "seen": message.version})
        return bool(cursor.rowcount == 1)


def audit_heads() -> Iterator[Head]:
    """Where each message stands about which something was decided; that it was published is no decision."""
    for pk, version in Message.objects.filter(version__gt=0).values_list("pk", "version").iterator(chunk_size=2000):
        yield Head(f"message:{pk}", version, None)
