"""The audit log's two tables. Rows come in through `audit_append` only (see log.py); nobody changes or deletes one."""

import json
from typing import Any

from django.db import models
from django.utils.functional import cached_property


class Entry(models.Model):
    """One decision, chained to the one before it about the same subject.

    `canonical` holds the bytes that were hashed. All other columns are copies of what stands in them, for filters and
    pages; `audit_verify` compares each copy with the bytes.
    """

    subject = models.TextField(db_collation="C")
    seq = models.IntegerField()
    tenant = models.TextField(db_collation="C")
    at = models.DateTimeField()
    event = models.TextField(db_collation="C")
    from_state = models.TextField(null=True, db_collation="C")  # noqa: DJ001 - null is "no state", as in the bytes
    to_state = models.TextField(null=True, db_collation="C")  # noqa: DJ001
    version = models.IntegerField(null=True)
    actor = models.TextField(db_collation="C")
    actor_kind = models.TextField(db_collation="C")
    on_behalf_of = models.TextField(null=True, db_collation="C")  # noqa: DJ001
    reason_code = models.TextField(db_collation="C")
    batch = models.TextField(null=True, db_collation="C")  # noqa: DJ001
    canonical = models.BinaryField()
    hash = models.BinaryField()

    class Meta:
        db_table = "audit_entry"
        constraints = [models.UniqueConstraint(fields=["subject", "seq"], name="audit_entry_subject_seq")]
        indexes = [
            models.Index("tenant", models.F("id").desc(), name="audit_entry_page"),
            models.Index("tenant", "at", "id", name="audit_entry_time"),
            models.Index("tenant", "actor", "id", name="audit_entry_actor"),
            models.Index("batch", name="audit_entry_batch", condition=models.Q(batch__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.subject} #{self.seq}: {self.event}"

    @cached_property
    def body(self) -> dict[str, Any]:
        """What the writer said, read from the hashed bytes: details, evidence, commitments and the rest."""
        body: dict[str, Any] = json.loads(bytes(self.canonical))["body"]
        return body

    def told(self, field: str) -> str | None:
        """The text behind a commitment (`reason`, `actor_name`): "" where none was given, None where it was erased."""
        if field not in self.body["commitments"]:
            return ""
        return next((opening.value for opening in self.openings.all() if opening.field == field), None)


class Opening(models.Model):
    """What a salted commitment in an entry's bytes stands for. Erasing the row leaves the proof as it was."""

    entry = models.ForeignKey(Entry, on_delete=models.DO_NOTHING, related_name="openings", db_index=False)
    field = models.TextField(db_collation="C")
    salt = models.BinaryField()
    value = models.TextField()

    class Meta:
        db_table = "audit_opening"
        constraints = [models.UniqueConstraint(fields=["entry", "field"], name="audit_opening_entry_field")]

    def __str__(self) -> str:
        return f"{self.field} of entry {self.entry_id}"
