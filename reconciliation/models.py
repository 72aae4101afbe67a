"""The ledger's tables: constraints and querysets, no verbs.

The application role may read them all. It changes operations, runs and the journal only through the functions in
sql/ledger.sql, which `transition.py` alone calls; a state cannot be written in any other way.
"""

from __future__ import annotations

import json
from typing import Any

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from .occurrences import JobKind, Missed, Overlap, SlotState
from .providers.base import Json
from .sealing import join
from .states import APPROVAL_OPEN, RUN_TERMINAL, ApprovalState, Kind, MessageState, RunState, State, Subject


def _choices_check(field: str, values: Any, name: str) -> models.CheckConstraint:
    return models.CheckConstraint(condition=Q(**{f"{field}__in": [str(v) for v in values]}), name=name)


class OperationQuerySet(models.QuerySet["Operation"]):
    """Reads that pages and the sweep share."""

    def of_tenants(self, tenants: Any) -> OperationQuerySet:
        """Only what these tenants own."""
        return self.filter(tenant__in=tenants)

    def needing_decision(self) -> OperationQuerySet:
        """Escalated: automation has stopped."""
        return self.filter(escalated_at__isnull=False)

    def being_looked_up(self) -> OperationQuerySet:
        """Unknown, and automation is still at it."""
        return self.filter(state=State.AMBIGUOUS, escalated_at__isnull=True)

    def in_flight(self) -> OperationQuerySet:
        """Claimed, or due to be."""
        waiting = [State.READY, State.PENDING, State.FAILED_RETRYABLE]
        return self.filter(state__in=waiting, escalated_at__isnull=True)


class Run(models.Model):
    """One execution of a workflow. Step results live in its operations; the run says where it stands."""

    tenant = models.CharField(max_length=64)
    workflow_type = models.CharField(max_length=200)
    workflow_id = models.CharField(max_length=200)
    workflow_version = models.IntegerField()
    workflow_digest = models.CharField(max_length=64, default="")  # of the declaration at the start; empty: not checked
    business_object = models.CharField(max_length=200)
    state = models.CharField(max_length=24)
    version = models.IntegerField(default=1)
    generation = models.IntegerField(default=0)
    lease_owner = models.CharField(max_length=120, default="")
    lease_until = models.DateTimeField(null=True)
    due_at = models.DateTimeField(null=True)  # when the sweep looks at it next; null: woken by a transition only
    waiting_for = models.CharField(max_length=200, default="")  # the step at which it stands
    lock = models.CharField(max_length=200, default="")  # what it works on alone, if anything
    lock_held = models.BooleanField(default=False)
    waived = ArrayField(models.CharField(max_length=200), default=list)  # steps whose undo a person vouched for
    replans = models.IntegerField(default=0)  # fresh decisions asked for so far
    voided = ArrayField(models.CharField(max_length=220), default=list)  # choices to be made anew: step@version
    escalated_at = models.DateTimeField(null=True)
    escalation_reason = models.CharField(max_length=64, default="")
    reason_code = models.CharField(max_length=64, default="")
    input_shown = models.TextField(default="{}")
    input_sealed = models.TextField(default="")
    input_fingerprint = models.CharField(max_length=80)  # the same id with another input is refused
    requested_by = models.CharField(max_length=120, default="")
    on_behalf_of = models.CharField(max_length=120, default="")
    owners = ArrayField(models.CharField(max_length=120), default=list)  # the people behind a token that asked
    intended_at = models.DateTimeField(null=True)  # when it was asked for, as far as that is shown
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "workflow_type", "workflow_id"], name="run_identity"),
            _choices_check("state", RunState, "run_state_known"),
            # Only a running or compensating run is held by somebody; every other one is held by nobody.
            models.CheckConstraint(
                condition=Q(lease_until__isnull=True) | Q(state__in=[RunState.RUNNING, RunState.COMPENSATING]),
                name="run_lease_only_while_held",
            ),
            models.CheckConstraint(
                condition=~Q(state=RunState.RUNNING) | Q(lease_until__isnull=False), name="run_running_has_lease"
            ),
            # An ended run is not due: nothing may go on with it without an explicit transition.
            models.CheckConstraint(
                condition=~Q(state__in=sorted(RUN_TERMINAL)) | Q(due_at__isnull=True),
                name="run_ended_is_not_due",
            ),
            # One run at a time works on what a lock names.
            models.UniqueConstraint(fields=["tenant", "lock"], condition=Q(lock_held=True), name="run_lock_held_once"),
        ]
        indexes = [
            models.Index(fields=["due_at"], condition=Q(due_at__isnull=False), name="run_due"),
            models.Index(fields=["created_at"], condition=Q(settled_at__isnull=True), name="run_open"),
            models.Index(fields=["tenant", "-id"], name="run_newest"),
            models.Index(fields=["tenant", "business_object"], name="run_object"),
            models.Index(fields=["tenant", "-id"], condition=Q(escalated_at__isnull=False), name="run_escalated"),
            # A cancelled run that a person has undone goes on again; the beat asks for these every second.
            models.Index(fields=["id"], condition=Q(state=RunState.COMPENSATING), name="run_compensating"),
        ]

    @property
    def subject(self) -> Subject:
        """What the single writer and the audit log know this run by."""
        return Subject(Kind.RUN, self.pk)

    @property
    def input(self) -> Json:
        """What the run was started with, whole. Never to be shown."""
        return join(self.input_shown, self.input_sealed)


class Operation(models.Model):
    """One intended external effect of one workflow step. See design, sections 1 and 2."""

    tenant = models.CharField(max_length=64)
    workflow_type = models.CharField(max_length=200)
    workflow_id = models.CharField(max_length=200)
    step = models.CharField(max_length=200)
    business_object = models.CharField(max_length=200)
    intent_version = models.IntegerField(default=1)
    lineage = models.BinaryField()  # 32 bytes: the identity without its version
    key = models.CharField(max_length=80, db_collation="C")
    # Neither this nor undo_of is a foreign key of the database, which would ask at every commit: the functions that
    # write hold what is referred to, and references_are_kept() refuses to delete it.
    run = models.ForeignKey(
        Run, null=True, on_delete=models.PROTECT, related_name="operations", db_index=False, db_constraint=False
    )
    execution = models.CharField(max_length=12, default="aftercall")  # who sends: aftercall | caller
    # What this one reverses; its step is then called undo:<step>.
    undo_of = models.ForeignKey(
        "self", null=True, on_delete=models.PROTECT, related_name="undos", db_index=False, db_constraint=False
    )
    retry_policy = models.TextField(default="")  # RetryPolicy as data; "": what the action declares
    ceiling_minor = models.BigIntegerField(null=True)  # what all of its action on this object may come to
    spent_is_final = models.BooleanField(default=True)  # a spent budget fails it; else it waits for a person
    consent = models.TextField(default="")  # the consent that it needs, as data; "": none

    provider = models.CharField(max_length=64)
    account = models.CharField(max_length=120)
    action = models.CharField(max_length=120)
    fingerprint = models.CharField(max_length=80)
    request_shown = models.TextField(default="{}")
    request_sealed = models.TextField(default="")
    amount_minor = models.BigIntegerField(null=True)  # minor units
    currency = models.CharField(max_length=8, default="")

    state = models.CharField(max_length=24)
    version = models.IntegerField(default=1)  # rises with every transition; every write compares it
    generation = models.IntegerField(default=0)  # rises with every claim and every expiry; fences late writers
    claim_nonce = models.UUIDField(null=True)
    lease_owner = models.CharField(max_length=120, default="")
    lease_until = models.DateTimeField(null=True)
    lease_ended_at = models.DateTimeField(null=True)  # when the last lease expired unanswered
    due_at = models.DateTimeField(null=True)  # when the sweep looks at it next
    not_before = models.DateTimeField(null=True)  # not claimable earlier; back-off ends here

    attempts = models.IntegerField(default=0)  # counted before the call
    unknown_attempts = ArrayField(models.IntegerField(), default=list)  # numbers of the attempts nobody knows about
    absent_reads = models.IntegerField(default=0)  # complete empty reads since the last send
    absent_read_at = models.DateTimeField(null=True)
    absences = models.IntegerField(default=0)  # times that absence was proven; one automatic retry follows the first
    sighted = models.BooleanField(default=False)  # a look-up saw something of it once; never unseen
    look_ups = models.IntegerField(default=0)
    identical_replays = models.IntegerField(default=0)  # times the provider replayed the same stored error
    first_sent_at = models.DateTimeField(null=True)
    last_sent_at = models.DateTimeField(null=True)
    same_key_until = models.DateTimeField(null=True)  # first send + key retention - margin
    escalate_at = models.DateTimeField(null=True)  # unknown beyond this: a person must act

    error_class = models.CharField(max_length=24, default="")
    reason_code = models.CharField(max_length=64, default="")
    escalated_at = models.DateTimeField(null=True)
    escalation_reason = models.CharField(max_length=64, default="")

    basis = models.CharField(max_length=12, default="")
    provider_operation_id = models.CharField(max_length=200, default="", db_collation="C")
    effect_id = models.CharField(max_length=200, default="", db_collation="C")  # unless the id names the target
    result_shown = models.TextField(default="")
    result_sealed = models.TextField(default="")
    cost_minor = models.BigIntegerField(default=0)

    requested_by = models.CharField(max_length=120, default="")
    on_behalf_of = models.CharField(max_length=120, default="")
    owners = ArrayField(models.CharField(max_length=120), default=list)  # the people behind a token that asked
    intended_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True)
    shredded_at = models.DateTimeField(null=True)  # the sealed bytes are gone; it can never be sent again

    objects = OperationQuerySet.as_manager()

    class Meta:
        constraints = [
            # One row an identity: the second claim of the same intent finds the first one.
            models.UniqueConstraint(fields=["lineage", "intent_version"], name="operation_identity"),
            models.UniqueConstraint(fields=["key"], name="operation_key"),
            # One effect object at the provider proves one operation.
            models.UniqueConstraint(
                fields=["provider", "account", "action", "effect_id"],
                condition=~Q(effect_id=""),
                name="operation_one_effect_one_operation",
            ),
            # What the columns of one row must hold together: operation_holds(), see migration 0008.
        ]
        indexes = [
            models.Index(fields=["due_at"], condition=Q(due_at__isnull=False), name="operation_due"),
            models.Index(fields=["tenant", "-id"], name="operation_newest"),
            models.Index(
                fields=["tenant", "state", "-id"],
                condition=~Q(state__in=[State.SUCCEEDED, State.FAILED_TERMINAL, State.TERMINATED]),
                name="operation_open",
            ),
            models.Index(fields=["tenant", "-id"], condition=Q(escalated_at__isnull=False), name="operation_escalated"),
            models.Index(
                fields=["tenant", "-settled_at"], condition=Q(settled_at__isnull=False), name="operation_settled"
            ),
            models.Index(fields=["tenant", "business_object"], name="operation_object"),
            models.Index(fields=["tenant", "workflow_id"], name="operation_workflow"),
            models.Index(
                fields=["provider_operation_id"], condition=~Q(provider_operation_id=""), name="operation_provider_id"
            ),
            models.Index(fields=["run", "id"], condition=Q(run__isnull=False), name="operation_run"),
            models.Index(fields=["undo_of"], condition=Q(undo_of__isnull=False), name="operation_undo_of"),
        ]

    @property
    def subject(self) -> Subject:
        """What the single writer and the audit log know this operation by."""
        return Subject(Kind.OPERATION, self.pk)

    @property
    def identity(self) -> str:
        """The parts that make it this operation, for people."""
        parts = (self.workflow_type, self.workflow_id, self.step, self.business_object, f"v{self.intent_version}")
        return " / ".join(parts)

    @property
    def stands_alone(self) -> bool:
        """Whether it is a compensation that a person asked for by itself: it was born after the end of its run, which
        is not held for it. What a walk back left behind when its run ended is older, and is not sent any more.
        """
        if self.undo_of_id is None or self.run is None or self.run.settled_at is None:
            return False
        return self.created_at >= self.run.settled_at

    @property
    def is_over(self) -> bool:
        """Whether it ended without an effect, and nothing speaks against that: a new intent repeats nothing."""
        ended = self.state in (State.FAILED_TERMINAL, State.TERMINATED)
        # What has ended is due only while a late report about it is being looked into.
        return ended and not self.unknown_attempts and not self.sighted and self.due_at is None

    @property
    def given_up(self) -> bool:
        """Whether a person stopped it while nobody knew if it was applied, and that is still so."""
        return self.state == State.TERMINATED and bool(self.unknown_attempts)

    @property
    def run_is_over(self) -> bool:
        """Whether its run has ended, so that nothing of it is sent any more."""
        return self.run is not None and self.run.settled_at is not None and not self.stands_alone

    @property
    def request(self) -> Json:
        """The first accepted request, whole: what is sent and re-sent. Never to be shown."""
        return join(self.request_shown, self.request_sealed)

    @property
    def result(self) -> Json:
        """What the provider answered, whole. Never to be shown."""
        return join(self.result_shown, self.result_sealed)

    @property
    def waived(self) -> bool:
        """Whether this is an undo that two people vouched for: it counts as done, and is not sent any more."""
        if self.undo_of_id is None or self.run is None:
            return False
        return self.step.removeprefix("undo:") in self.run.waived


class Approval(models.Model):
    """A request for one person's consent to one exact action, and what became of it.

    `action` is empty where the operation itself is to be sent, else the name of the operator action that needs a second
    person. What is agreed to is what `fingerprint` says; a changed request never fits an old consent.
    """

    tenant = models.CharField(max_length=64)
    operation = models.ForeignKey(
        Operation, null=True, on_delete=models.PROTECT, related_name="approvals", db_index=False
    )
    run = models.ForeignKey(Run, null=True, on_delete=models.PROTECT, related_name="approvals", db_index=False)
    limit = models.ForeignKey("Limit", null=True, on_delete=models.PROTECT, related_name="approvals", db_index=False)
    job = models.ForeignKey("Job", null=True, on_delete=models.PROTECT, related_name="approvals", db_index=False)
    action = models.CharField(max_length=40, default="")
    inputs = models.TextField(default="{}")  # JSON: what the action was asked with
    fingerprint = models.CharField(max_length=80)
    state = models.CharField(max_length=12)
    version = models.IntegerField(default=1)
    policy = models.TextField(default="")  # why consent is needed, for the approver
    reason = models.TextField(default="")  # why it was asked for
    seen_shown = models.TextField(default="")  # what the provider showed when it was asked; "": not looked at
    seen_sealed = models.TextField(default="")
    requested_by = models.CharField(max_length=120, default="")
    on_behalf_of = models.CharField(max_length=120, default="")
    forbidden = ArrayField(models.CharField(max_length=120), default=list)  # who may never approve it
    use_within = models.IntegerField()  # seconds from the approval to the claim
    expires_at = models.DateTimeField()  # from this moment on nobody can approve it
    use_by = models.DateTimeField(null=True)  # from this moment on it can no longer be used
    due_at = models.DateTimeField(null=True)  # when the sweep ends it
    decided_by = models.CharField(max_length=120, default="")
    decision_reason = models.TextField(default="")
    decided_at = models.DateTimeField(null=True)
    replaces = models.ForeignKey("self", null=True, on_delete=models.PROTECT, db_index=False)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            _choices_check("state", ApprovalState, "approval_state_known"),
            # It is about one operation, run, limit or job; only what names an action is about one of the last three.
            models.CheckConstraint(
                condition=Q(operation__isnull=False, run__isnull=True, limit__isnull=True, job__isnull=True)
                | (
                    ~Q(action="")
                    & Q(operation__isnull=True)
                    & (
                        Q(run__isnull=False, limit__isnull=True, job__isnull=True)
                        | Q(run__isnull=True, limit__isnull=False, job__isnull=True)
                        | Q(run__isnull=True, limit__isnull=True, job__isnull=False)
                    )
                ),
                name="approval_has_one_subject",
            ),
            # One open request for one thing: a second one finds the first.
            models.UniqueConstraint(
                fields=["operation", "action"], condition=Q(state__in=sorted(APPROVAL_OPEN)), name="approval_open_once"
            ),
            models.UniqueConstraint(
                fields=["run", "action", "inputs"],
                condition=Q(state__in=sorted(APPROVAL_OPEN)),
                name="approval_open_once_a_run",
            ),
            models.UniqueConstraint(
                fields=["limit", "action", "inputs"],
                condition=Q(state__in=sorted(APPROVAL_OPEN)),
                name="approval_open_once_a_limit",
            ),
            models.UniqueConstraint(
                fields=["job", "action", "inputs"],
                condition=Q(state__in=sorted(APPROVAL_OPEN)),
                name="approval_open_once_a_job",
            ),
            # A decision has a person, a moment and, where it agrees, an end.
            models.CheckConstraint(
                condition=~Q(state__in=[ApprovalState.APPROVED, ApprovalState.DENIED, ApprovalState.CONSUMED])
                | (Q(decided_at__isnull=False) & ~Q(decided_by="")),
                name="approval_decision_has_person",
            ),
            models.CheckConstraint(
                condition=~Q(state__in=[ApprovalState.APPROVED, ApprovalState.CONSUMED]) | Q(use_by__isnull=False),
                name="approval_agreed_has_use_by",
            ),
            # An open request is ended by the sweep if nobody else ends it: none waits for ever.
            models.CheckConstraint(
                condition=Q(state__in=sorted(APPROVAL_OPEN), due_at__isnull=False)
                | (~Q(state__in=sorted(APPROVAL_OPEN)) & Q(due_at__isnull=True)),
                name="approval_open_is_due",
            ),
        ]
        indexes = [
            models.Index(fields=["due_at"], condition=Q(due_at__isnull=False), name="approval_due"),
            models.Index(fields=["tenant", "state", "expires_at"], name="approval_tenant_state"),
            models.Index(fields=["tenant", "-settled_at"], name="approval_settled"),
            models.Index(fields=["operation", "-id"], name="approval_operation"),
            models.Index(fields=["run", "-id"], condition=Q(run__isnull=False), name="approval_run"),
        ]

    @property
    def subject(self) -> Subject:
        """What the single writer and the audit log know this approval by."""
        return Subject(Kind.APPROVAL, self.pk)

    @property
    def seen(self) -> Json:
        """What the provider showed when it was asked, whole. Never to be shown."""
        return join(self.seen_shown, self.seen_sealed)


class JournalEntry(models.Model):
    """What was observed: attempts, receipts, silence, findings, late reports. Append-only."""

    # See references_are_kept(): a foreign key would ask at every commit.
    operation = models.ForeignKey(Operation, null=True, on_delete=models.PROTECT, db_index=False, db_constraint=False)
    run = models.ForeignKey(Run, null=True, on_delete=models.PROTECT, db_index=False, db_constraint=False)
    at = models.DateTimeField()
    kind = models.CharField(max_length=32)
    attempt = models.IntegerField(null=True)
    generation = models.IntegerField(null=True)
    observer = models.CharField(max_length=120, default="")  # the worker or person that saw it
    data = models.TextField(default="{}")  # JSON; shown fields only
    sealed = models.TextField(default="")  # the others

    class Meta:
        indexes = [
            models.Index(fields=["operation", "id"], condition=Q(operation__isnull=False), name="journal_operation"),
            models.Index(fields=["run", "id"], condition=Q(run__isnull=False), name="journal_run"),
        ]


class Chosen(models.Model):
    """What a choice step proposed: stored once, reused on every replay. Append-only."""

    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="choices", db_index=False)
    step = models.CharField(max_length=200)
    version = models.IntegerField()  # a fresh decision is a new version, with a reason
    valid = models.BooleanField()
    problem = models.TextField(default="")  # why an invalid proposal was refused
    reason = models.TextField(default="")  # why it was decided afresh
    value_shown = models.TextField(default="{}")
    value_sealed = models.TextField(default="")
    at = models.DateTimeField()

    class Meta:
        constraints = [
            # Two workers that ask at the same time: the first valid proposal of a version counts for both.
            models.UniqueConstraint(fields=["run", "step", "version"], condition=Q(valid=True), name="chosen_once"),
        ]
        indexes = [
            models.Index(fields=["run", "id"], name="chosen_run"),
            # What retention has yet to shred.
            models.Index(fields=["run"], condition=Q(valid=False) & ~Q(value_sealed=""), name="chosen_refused_sealed"),
        ]

    @property
    def value(self) -> Json:
        """What was chosen, whole. Never to be shown."""
        return join(self.value_shown, self.value_sealed)


class Job(models.Model):
    """A schedule: when a workflow is to run, and what is done about starts that were missed or overlap.

    Written by schedules.py and backlog.py alone. Its runs are found by its name and their scheduled time.
    """

    tenant = models.CharField(max_length=64)
    name = models.CharField(max_length=80)  # never changes: it is part of each run's id
    kind = models.CharField(max_length=12)
    expression = models.CharField(max_length=120)
    zone = models.CharField(max_length=64)
    anchor = models.DateTimeField()  # intervals are counted from here
    workflow = models.CharField(max_length=200)
    input_shown = models.TextField(default="{}")
    input_sealed = models.TextField(default="")
    missed = models.CharField(max_length=16)
    repeats_accepted = models.BooleanField(default=False)  # a person accepted "run all" for actions without a key
    max_catch_up = models.DurationField(null=True)  # older missed starts are never run
    overlap = models.CharField(max_length=16)
    start_deadline = models.DurationField(null=True)  # a start later than this is not made
    max_run_time = models.DurationField(null=True)  # a run that takes longer waits for a person
    enabled = models.BooleanField(default=True)
    next_at = models.DateTimeField(null=True)  # the first occurrence that is not decided yet
    next_local = models.CharField(
        max_length=120, default="", db_default=""
    )  # its wall time by the zone data that named it
    decided_until = models.DateTimeField(null=True)  # up to here nothing is left to decide
    looked_at = models.DateTimeField(null=True)  # by a beat; who was looked at longest ago comes first
    problem = models.CharField(max_length=64, default="")  # why its starts are not being made
    version = models.IntegerField(default=1)  # rises with every edit; every edit compares it
    zone_data = models.CharField(max_length=16)  # IANA version with which next_at was worked out
    changed_by = models.CharField(max_length=120)  # for whom its runs act
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="job_name"),
            _choices_check("kind", JobKind, "job_kind_known"),
            _choices_check("missed", Missed, "job_missed_known"),
            _choices_check("overlap", Overlap, "job_overlap_known"),
            # A job that is off expects nothing.
            models.CheckConstraint(condition=Q(enabled=True) | Q(next_at__isnull=True), name="job_off_is_not_due"),
        ]
        indexes = [models.Index(fields=["next_at"], condition=Q(next_at__isnull=False), name="job_due")]

    @property
    def subject(self) -> str:
        """What the audit log knows this job by."""
        return f"job:{self.pk}"

    @property
    def input(self) -> Json:
        """What its runs are started with, whole. Never to be shown."""
        return join(self.input_shown, self.input_sealed)


class Slot(models.Model):
    """One expected run of a job and what became of it; or a range of them, in one row."""

    job = models.ForeignKey(Job, on_delete=models.PROTECT, related_name="slots", db_index=False)
    scheduled_for = models.DateTimeField()
    local = models.CharField(max_length=120)  # the wall time that was planned, and its zone
    shifted = models.BooleanField(default=False)  # that wall time does not exist: the first instant after the gap
    manual = models.BooleanField(default=False)  # a new intent of a person: no occurrence of the schedule
    state = models.CharField(max_length=16)
    reason_code = models.CharField(max_length=64, default="")
    count = models.BigIntegerField(default=1)
    until = models.DateTimeField(null=True)  # the last of a range
    terms = models.JSONField(null=True)  # of a range: kind, expression, zone and anchor that name its times
    answered_by = models.CharField(
        max_length=120, default="", db_default=""
    )  # who said that it is to be run asks for its run
    # Neither is a foreign key of the database: an ended run goes after its time, and what was expected stays.
    run = models.ForeignKey(
        Run, null=True, on_delete=models.PROTECT, related_name="slots", db_index=False, db_constraint=False
    )
    behind = models.ForeignKey(
        Run, null=True, on_delete=models.PROTECT, related_name="+", db_index=False, db_constraint=False
    )
    window_start = models.DateTimeField()  # where the window before this one ended
    open = models.BooleanField(default=False)  # its run may still go on
    counted_from = models.DateTimeField(null=True)  # the longest run is counted from here, once
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            # However many beats there are: one slot an instant, and one a local time, so that a repeated hour runs a
            # daily job once. Where the instant decides, the text carries the offset.
            models.UniqueConstraint(fields=["job", "scheduled_for"], name="slot_once"),
            models.UniqueConstraint(fields=["job", "local"], name="slot_local_once"),
            _choices_check("state", SlotState, "slot_state_known"),
            # Started means that there is a run, and nothing else has one.
            models.CheckConstraint(
                condition=Q(state=SlotState.STARTED, run__isnull=False)
                | (~Q(state=SlotState.STARTED) & Q(run__isnull=True)),
                name="slot_started_has_run",
            ),
            models.CheckConstraint(condition=Q(count__gte=1), name="slot_counts"),
        ]
        indexes = [
            models.Index(
                fields=["job", "scheduled_for"],
                condition=Q(state__in=[SlotState.DUE, SlotState.QUEUED, SlotState.CATCHING_UP]),
                name="slot_waiting",
            ),
            models.Index(fields=["job"], condition=Q(open=True), name="slot_open"),
            models.Index(fields=["run"], condition=Q(run__isnull=False), name="slot_run"),
        ]


class AllowedMove(models.Model):
    """The pairs of states.py as the database checks them. Written by schema.install() alone."""

    kind = models.CharField(max_length=12)
    source = models.CharField(max_length=24)  # "" is the birth
    target = models.CharField(max_length=24)

    class Meta:
        db_table = "reconciliation_move"
        constraints = [models.UniqueConstraint(fields=["kind", "source", "target"], name="move_once")]


class Limit(models.Model):
    """What holds claims back: a stop switch, or how many or how much at once or in a window. "" covers everything."""

    kind = models.CharField(max_length=12)  # stop | concurrency | rate | amount | restored | replay (fence.py)
    tenant = models.CharField(max_length=64, default="", blank=True)
    provider = models.CharField(max_length=64, default="", blank=True)
    action = models.CharField(max_length=120, default="", blank=True)
    workflow_type = models.CharField(max_length=200, default="", blank=True)
    currency = models.CharField(max_length=8, default="", blank=True)
    most = models.BigIntegerField(null=True)  # calls, or minor units; null for a stop switch
    window_seconds = models.IntegerField(null=True)
    since = models.DateTimeField()
    set_by = models.CharField(max_length=120)
    set_by_name = models.CharField(max_length=200, default="")
    reason = models.TextField(default="")
    version = models.IntegerField(default=1)
    lifted_at = models.DateTimeField(null=True)
    lifted_by = models.CharField(max_length=120, default="")

    class Meta:
        constraints = [
            # One limit of a kind on one place for each length of window, or where it has none. Every claim looks into
            # this index, which is usually empty.
            models.UniqueConstraint(
                fields=["kind", "tenant", "provider", "action", "workflow_type", "currency", "window_seconds"],
                condition=Q(lifted_at__isnull=True),
                nulls_distinct=False,
                name="limit_once",
            ),
            _choices_check("kind", ["stop", "concurrency", "rate", "amount", "restored", "replay"], "limit_kind_known"),
            # A limit without a number, or a window without a length, would hold back everything or nothing.
            models.CheckConstraint(
                condition=Q(kind__in=["stop", "restored"], most__isnull=True)
                | Q(kind="replay", most__isnull=True, window_seconds__gt=0)
                | Q(kind="concurrency", most__gt=0)
                | Q(kind="rate", most__gt=0, window_seconds__gt=0)
                | (Q(kind="amount", most__gt=0, window_seconds__gt=0) & ~Q(currency="")),
                name="limit_is_whole",
            ),
        ]

    @property
    def subject(self) -> str:
        """What the audit log knows it by."""
        return f"limit:{self.pk}"


class LimitUse(models.Model):
    """One claim that a window counts. Written only where there is a limit with a window."""

    limit = models.ForeignKey(Limit, on_delete=models.CASCADE, db_index=False)
    operation_id = models.BigIntegerField()
    attempt = models.IntegerField()
    at = models.DateTimeField()
    amount_minor = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["limit", "operation_id", "attempt"], name="limit_use_once")]
        indexes = [models.Index(fields=["limit", "at"], name="limit_use_window")]


class HeldBack(models.Model):
    """That a limit refused an operation's claim: one row for each pair, however often the sweep comes by."""

    operation_id = models.BigIntegerField()
    limit = models.ForeignKey(Limit, null=True, on_delete=models.CASCADE)
    code = models.CharField(max_length=24)
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    times = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["operation_id", "limit"], name="held_back_once", nulls_distinct=False)
        ]


class LocalEffect(models.Model):
    """Marks a transaction as that of a local effect until its fence has passed. No row outlives its transaction."""

    operation_id = models.BigIntegerField()
    generation = models.IntegerField()

    class Meta:
        # It holds what was deleted until a vacuum comes by: without an index each fence would read all of that.
        indexes = [models.Index(fields=["operation_id"], name="local_effect_operation")]


class Message(models.Model):
    """What business code asked for in its own transaction, and which operation came of it.

    Written by outbox.py alone. Its identity is that of the operation, so that publishing it twice makes one operation.
    """

    tenant = models.CharField(max_length=64)
    workflow_type = models.CharField(max_length=200)
    workflow_id = models.CharField(max_length=200)
    step = models.CharField(max_length=200)
    business_object = models.CharField(max_length=420)  # as JSON: the text "7" and the number 7 are two objects
    intent_version = models.IntegerField(default=1)
    lineage = models.BinaryField()
    ordering = models.CharField(max_length=200, default="")  # messages that share it go one after the other; "": none
    provider = models.CharField(max_length=64)
    action = models.CharField(max_length=120)
    fingerprint = models.CharField(
        max_length=80
    )  # of all that was asked for; another one under this identity is refused
    request_sealed = models.TextField(default="")  # all of it; emptied when it is published
    terms = models.TextField(default="{}")  # JSON: retry policy, consent, owners
    requested_by = models.CharField(max_length=120, default="")
    on_behalf_of = models.CharField(max_length=120, default="")
    intended_at = models.DateTimeField()
    state = models.CharField(max_length=12)
    version = models.IntegerField(default=0)  # rises with every decision about it; each of them is in the audit log
    due_at = models.DateTimeField(null=True)
    tries = models.IntegerField(default=0)  # in vain, since it waits
    problem = models.CharField(max_length=64, default="")  # a reason code: why the last try was in vain
    detail = models.CharField(max_length=300, default="")  # the same as a sentence; never what was asked for
    operation_id = models.BigIntegerField(null=True)  # no foreign key: it outlives the operation, or goes before it
    created_at = models.DateTimeField()
    changed_at = models.DateTimeField()

    class Meta:
        constraints = [
            # One message an identity: business code that is run twice asks once.
            models.UniqueConstraint(fields=["lineage", "intent_version"], name="message_identity"),
            _choices_check("state", MessageState, "message_state_known"),
            # What waits is looked at again, and nothing else is.
            models.CheckConstraint(
                condition=Q(state=MessageState.WAITING, due_at__isnull=False)
                | (~Q(state=MessageState.WAITING) & Q(due_at__isnull=True)),
                name="message_waiting_is_due",
            ),
            # Published means that there is an operation.
            models.CheckConstraint(
                condition=Q(state=MessageState.PUBLISHED, operation_id__isnull=False)
                | (~Q(state=MessageState.PUBLISHED) & Q(operation_id__isnull=True)),
                name="message_published_has_operation",
            ),
            # What may still be published has something to publish; what is stuck says why.
            models.CheckConstraint(
                condition=~Q(state__in=[MessageState.WAITING, MessageState.STUCK]) | ~Q(request_sealed=""),
                name="message_open_has_request",
            ),
            models.CheckConstraint(
                condition=~Q(state=MessageState.STUCK) | ~Q(problem=""), name="message_stuck_says_why"
            ),
        ]
        indexes = [
            models.Index(
                fields=["state", "due_at", "id"],
                condition=Q(state__in=[MessageState.WAITING, MessageState.STUCK]),
                name="message_open",
            ),
            # A tenant's page does not read the backlog of the others.
            models.Index(
                fields=["tenant", "state", "due_at", "id"],
                condition=Q(state__in=[MessageState.WAITING, MessageState.STUCK]),
                name="message_open_tenant",
            ),
            models.Index(fields=["tenant", "ordering", "id"], condition=~Q(ordering=""), name="message_in_order"),
            models.Index(
                fields=["changed_at"],
                condition=Q(state__in=[MessageState.PUBLISHED, MessageState.DISCARDED]),
                name="message_done",
            ),
            models.Index(fields=["tenant", "-id"], name="message_newest"),
        ]

    @property
    def subject(self) -> str:
        """What the audit log knows it by."""
        return f"message:{self.pk}"

    @property
    def object_text(self) -> str:
        """The business object as people write it."""
        return str(json.loads(self.business_object))


class Signal(models.Model):
    """A condition that a person should see, from when it was noticed until it is over."""

    kind = models.CharField(max_length=40)
    tenant = models.CharField(max_length=64, default="")  # "" concerns everybody
    subject = models.CharField(max_length=160)
    since = models.DateTimeField()
    seen_at = models.DateTimeField()
    detail = models.CharField(max_length=300, default="")
    cleared_at = models.DateTimeField(null=True)
    told_open = models.BooleanField(default=False)  # the hook took it
    told_cleared = models.BooleanField(default=False)
    tries = models.IntegerField(default=0)  # in vain, of what is told next
    tell_at = models.DateTimeField(null=True)  # when the hook is called next; null: nothing is to be told
    not_told_at = models.DateTimeField(null=True)  # when the last try had failed, too

    class Meta:
        constraints = [
            # Two beats that notice the same thing make one row.
            models.UniqueConstraint(
                fields=["kind", "subject"], condition=Q(cleared_at__isnull=True), name="signal_open_once"
            )
        ]
        indexes = [
            models.Index(fields=["tell_at"], condition=Q(tell_at__isnull=False), name="signal_to_tell"),
            models.Index(fields=["cleared_at"], condition=Q(cleared_at__isnull=False), name="signal_cleared"),
        ]


class Tombstone(models.Model):
    """What outlives a pruned operation or run: enough to know its intent again and to say how it ended."""

    kind = models.CharField(max_length=12)  # operation | run
    subject_id = models.BigIntegerField()
    tenant = models.CharField(max_length=64)
    lineage = models.BinaryField()
    intent_version = models.IntegerField()
    key_hash = models.BinaryField(null=True)  # SHA-256 of the operation key
    fingerprint = models.CharField(max_length=80)
    state = models.CharField(max_length=24)
    basis = models.CharField(max_length=12, default="")
    reason_code = models.CharField(max_length=64, default="")
    version = models.IntegerField()  # of the audit entry that ends its chain
    settled_at = models.DateTimeField()
    pruned_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["lineage", "intent_version"], name="tombstone_identity"),
            models.UniqueConstraint(fields=["kind", "subject_id"], name="tombstone_subject"),
        ]
        indexes = [models.Index(fields=["pruned_at"], name="tombstone_age")]


class RestoreFence(models.Model):
    """Whether this is the ledger that the anchor outside the database knows. One row, once it has been anchored.

    Written by fence.py and restore.py alone. While it is down a Limit of kind `restored` refuses every claim.
    """

    database = models.UUIDField()  # the ledger's identity: given at its first start, and anew with each release
    state = models.CharField(max_length=8)  # up | down
    version = models.IntegerField(default=0)  # rises with every decision about the fence
    mark = models.BigIntegerField(default=0)  # rises before each writing of the anchor: who has it is not behind it
    signature = models.CharField(max_length=80, default="")  # of the anchor that it came down before
    reason = models.CharField(max_length=24, default="")
    found = models.TextField(default="{}")  # JSON: what the anchor knew, and what is here
    known_until = models.DateTimeField(null=True)  # the newest decision that this database knew when it came down
    since = models.DateTimeField(null=True)
    # Which operations and runs have been marked so far, and up to which they are: by id, in bounded steps.
    marking = models.BooleanField(default=False)
    operations_to = models.BigIntegerField(default=0)
    operations_end = models.BigIntegerField(default=0)
    runs_to = models.BigIntegerField(default=0)
    runs_end = models.BigIntegerField(default=0)
    marked = models.BigIntegerField(default=0)  # operations that became unknown by it
    released_at = models.DateTimeField(null=True)
    released_by = models.CharField(max_length=120, default="")
    released_by_name = models.CharField(max_length=200, default="")
    release_reason = models.TextField(default="")

    class Meta:
        constraints = [
            _choices_check("state", ["up", "down"], "fence_state_known"),
            # There is one ledger in a database.
            models.CheckConstraint(condition=Q(id=1), name="fence_is_one"),
            models.CheckConstraint(condition=Q(state="up") | Q(since__isnull=False), name="fence_down_has_time"),
        ]

    @property
    def is_down(self) -> bool:
        """Whether nothing may be sent."""
        return self.state == "down"

    @property
    def is_marked(self) -> bool:
        """Whether everything that may have been sent since the backup has become unknown."""
        return self.marking and self.operations_to >= self.operations_end and self.runs_to >= self.runs_end


class Worker(models.Model):
    """A process that may send. Its death can be proven only where it lived: by boot, process namespace and pid."""

    name = models.CharField(max_length=120, unique=True)
    role = models.CharField(max_length=12)  # worker | beat | web
    host = models.CharField(max_length=120)
    boot_id = models.CharField(max_length=64)
    pid_namespace = models.CharField(max_length=64)
    pid = models.IntegerField()
    pid_started = models.BigIntegerField()  # clock ticks since boot: tells a reused pid from the process meant
    started_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    dead_at = models.DateTimeField(null=True)  # proven, not presumed

    class Meta:
        indexes = [models.Index(fields=["boot_id"], condition=Q(dead_at__isnull=True), name="worker_alive")]


class Tick(models.Model):
    """When a recurring duty (beat, sweep) was last done, for the health page."""

    name = models.CharField(max_length=40, primary_key=True)
    at = models.DateTimeField()
    by = models.CharField(max_length=120)
    handled = models.IntegerField(default=0)


class Clock(models.Model):
    """What is known of the database's own clock, in one row that timekeeping.py writes through a function."""

    told = models.DateTimeField()  # the latest time that it told
    set_at = models.DateTimeField(null=True)  # when it was last set, by the clock as it was then
    set_by = models.FloatField(default=0)  # seconds; below 0 it was set back
    forward_at = models.DateTimeField(null=True)  # when it was last set forward, by the clock as it is now


class ActionToken(models.Model):
    """A form's one-time token: the same token gets the first answer again."""

    token = models.UUIDField(primary_key=True)
    tenant = models.CharField(max_length=64)
    actor = models.CharField(max_length=120)
    action = models.CharField(max_length=40)
    subject = models.CharField(max_length=120)
    created_at = models.DateTimeField()
    verdict = models.CharField(max_length=24, default="")  # "" while the first press is at work
    message = models.TextField(default="")
