"""The feed of the example: claims that come in at the order desk, and a world that now and then loses an answer.

The first start brings a dozen claims with one scripted misfortune each; after that a claim comes in every few seconds,
most of them without trouble. What goes wrong, goes wrong in the sandbox servers and in a worker that is really killed;
the ledger is told nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import structlog

from reconciliation import jobs, runs, tasks
from reconciliation.actors import Actor
from reconciliation.jobs import Terms
from reconciliation.keys import Identity, operation_key
from reconciliation.models import Job, Operation, Run, Worker
from reconciliation.providers.base import Json

log = structlog.get_logger(__name__)

AGENT = Actor(id="agent:desk-2", kind="agent", name="order desk agent")
DESK = Actor(id="system:order-desk", kind="system")
TENANTS = ("acme", "acme", "acme", "beta")
PAUSE = 12.0  # seconds between two claims of the quiet stream
MOST = 400  # claims of one start; after that the desk is closed for the day
FOR_EVER = 1_000_000
_NAMES = ("Ada Fenn", "Bo Lindqvist", "Chidi Obi", "Dana Roth", "Emil Sato", "Fay Marsh", "Gita Rao", "Hugo Brand")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Claim:
    """One damaged-item claim."""

    number: int
    tenant: str
    amount: int
    currency: str = "USD"

    @property
    def id(self) -> str:
        return f"T-{self.number}"

    @property
    def order(self) -> str:
        return str(1000 + self.number)

    def input(self) -> Json:
        name = _NAMES[self.number % len(_NAMES)]
        return {
            "order": self.order,
            "ticket": self.id,
            "amount": self.amount,
            "currency": self.currency,
            "card": f"card_{4000 + self.number}",
            "customer": name,
            "email": f"{name.split()[0].lower()}@example.com",
            "address": f"{self.number} Mill Lane",
            "window": "tomorrow 9-12",
            "service": "return",
        }

    def key(self, step: str) -> str:
        """The operation key of one of its steps."""
        return operation_key(
            Identity(
                tenant=self.tenant,
                workflow_type="damaged_item",
                workflow_id=self.id,
                step=step,
                business_object=self.order,
            )
        )


def fault(provider: str, kind: str, **rule: Any) -> None:
    """Script the sandbox: see examples/order_desk/sandbox/faults.py."""
    _control(provider, "POST", "faults", {"fault": kind, **rule})


def _control(provider: str, method: str, name: str, body: Json | None = None) -> Any:
    url = f"{os.environ[f'ORDER_DESK_{provider.upper()}_URL']}/_control/{name}"
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)  # noqa: S310 - a loopback address of our own
    with _direct.open(request, timeout=10) as answer:
        return json.load(answer)


# Misfortunes: each scripts the world for one claim, before it is started


def nothing(claim: Claim) -> None:
    """All goes well."""


def refund_answer_lost(claim: Claim) -> None:
    """The refund is made, the answer is lost, and pay cannot be asked for a while: a person presses "Look up"."""
    fault("pay", "timeout_after", order=claim.order)
    _silent(claim)


def _silent(claim: Claim) -> None:
    """Pay answers neither the look-ups nor the retries of automation. `Feed.mend` ends it when a person is needed."""
    fault("pay", "unavailable", action="look_up", key=claim.key("issue_refund"), times=FOR_EVER)
    fault("pay", "unavailable", action="look_up", order=claim.order, times=FOR_EVER)
    fault("pay", "bad_gateway_before", order=claim.order, times=FOR_EVER)


def refund_answer_lost_briefly(claim: Claim) -> None:
    """The refund is made, the answer is lost, and the first look-up finds it."""
    fault("pay", "reset_after", order=claim.order)


def amount_differs(claim: Claim) -> None:
    """Pay books a tenth of what was asked, and the answer is lost."""
    fault("pay", "wrong_amount", order=claim.order, change={"amount": claim.amount // 10})


def mail_lost(claim: Claim) -> None:
    """The mail never goes out, and no index proves that."""
    fault("mail", "lost", order=claim.order)


def mail_look_up_down(claim: Claim) -> None:
    """The mail goes out, the answer is lost, and the index of this account does not answer."""
    fault("mail", "reset_after", order=claim.order)
    fault("mail", "unavailable", action="look_up", reference=claim.key("send_email"), times=FOR_EVER)


def pay_busy(claim: Claim) -> None:
    """Pay is down twice, then works: retried by itself."""
    fault("pay", "unavailable", order=claim.order, times=2)


def pickup_refused(claim: Claim) -> None:
    """The carrier refuses the pickup after the label was made."""
    fault("carrier", "reject", action="pickup.schedule", order=claim.order, status=422)


def pickup_on_the_van(claim: Claim) -> None:
    """Pay refuses the refund, and what was made for it is taken back; but the driver has the parcel already."""
    fault("pay", "reject", order=claim.order, status=402, says="the card was closed")
    fault("carrier", "reject", key=claim.key("undo:schedule_pickup"), status=422, says="already on the van")


def label_answer_halved(claim: Claim) -> None:
    """The label is made; half of the answer arrives."""
    fault("carrier", "half_answer", action="label.create", order=claim.order)


def ticket_gateway(claim: Claim) -> None:
    """A proxy answers 502 after the ticket was closed: closing it again is the same."""
    fault("tickets", "bad_gateway_after", id=claim.input()["ticket"])


def worker_killed(claim: Claim) -> None:
    """The worker is killed with SIGKILL while pay has made the refund and has not answered yet."""
    fault("pay", "hang_after_effect", order=claim.order)
    _silent(claim)


def large(claim: Claim) -> None:
    """Nothing goes wrong; the amount is one for which an approver must agree first."""


FIRST_DAY: tuple[tuple[int, Callable[[Claim], None]], ...] = (
    (4200, worker_killed),
    (12900, refund_answer_lost),
    (46000, amount_differs),
    (3150, nothing),
    (8800, mail_lost),
    (2499, mail_look_up_down),
    (15000, refund_answer_lost_briefly),
    (5600, pay_busy),
    (31000, pickup_refused),
    (1999, label_answer_halved),
    (7450, ticket_gateway),
    (9900, nothing),
    (4300, nothing),
    (22000, refund_answer_lost),
    (5900, pickup_on_the_van),
    (64000, large),
    (125000, large),
    (51900, large),
)
QUIET: tuple[tuple[float, Callable[[Claim], None]], ...] = (
    (70, nothing),
    (8, refund_answer_lost_briefly),
    (6, pay_busy),
    (6, label_answer_halved),
    (4, ticket_gateway),
    (2, mail_lost),
    (2, refund_answer_lost),
    (1, amount_differs),
    (1, pickup_refused),
    (1, pickup_on_the_van),
    (4, large),
)


@dataclass
class Feed:
    """Brings in claims, one after the other, from the number after the last one that the ledger knows."""

    dice: random.Random = field(default_factory=random.Random)
    silent: list[Claim] = field(default_factory=list)  # pay says nothing about them

    def run(self) -> None:
        """Feed until the desk is closed."""
        keep_schedules()
        _control("pay", "DELETE", "faults")  # what an earlier start left broken is repaired
        for claim, misfortune in self.claims():
            self.bring_in(claim, misfortune)
            if misfortune is worker_killed:
                kill_the_holder(claim)
        log.info("desk_closed", claims=MOST)

    def claims(self) -> Iterator[tuple[Claim, Callable[[Claim], None]]]:
        """The first day at once, then a quiet stream."""
        number = Run.objects.filter(workflow_type="damaged_item").count()
        if number == 0:
            for amount, misfortune in FIRST_DAY:
                number += 1
                yield Claim(number, TENANTS[number % len(TENANTS)], amount), misfortune
        for _ in range(MOST):
            self.pause()
            number += 1
            weights, kinds = [weight for weight, _ in QUIET], [kind for _, kind in QUIET]
            kind = self.dice.choices(kinds, weights)[0]
            amount = self.dice.randrange(50_100, 90_000) if kind is large else self.dice.randrange(900, 40_000)
            yield Claim(number, TENANTS[number % len(TENANTS)], amount), kind

    def pause(self) -> None:
        """Wait for the next claim, and mend meanwhile what is a person's by now."""
        until = time.monotonic() + PAUSE
        while time.monotonic() < until:
            self.mend()
            time.sleep(1)

    def mend(self) -> None:
        """Pay answers again about each claim with which automation has stopped: now a look-up by a person finds it."""
        for claim in list(self.silent):
            if Operation.objects.filter(key=claim.key("issue_refund"), escalated_at__isnull=False).exists():
                _control("pay", "DELETE", f"faults?key={claim.key('issue_refund')}")
                _control("pay", "DELETE", f"faults?order={claim.order}")
                self.silent.remove(claim)

    def bring_in(self, claim: Claim, misfortune: Callable[[Claim], None]) -> None:
        """Script the world for the claim, then start its run through the public interface."""
        misfortune(claim)
        if misfortune in (worker_killed, refund_answer_lost):
            self.silent.append(claim)
        runs.start(
            "damaged_item",
            tenant=claim.tenant,
            workflow_id=claim.id,
            input=claim.input(),
            actor=AGENT,
            on_behalf_of="op_ann",
        )
        tasks.wake()


SCHEDULES = {
    "ticket-sweep": Terms(expression="*/2 * * * *", workflow="ticket_sweep", input={"ticket": "T-1"}, missed="skip"),
    "morning-look": Terms(
        expression="30 2 * * *", zone="America/New_York", workflow="ticket_sweep", input={"ticket": "T-2"}
    ),
}


def keep_schedules() -> None:
    """Make the desk's schedules where they are missing; what a person changed since stays."""
    for name, terms in SCHEDULES.items():
        if not Job.objects.filter(tenant="acme", name=name).exists():
            jobs.create(tenant="acme", name=name, terms=terms, token=uuid4(), actor=DESK)


def kill_the_holder(claim: Claim, *, longest: float = 20.0) -> None:
    """SIGKILL the worker that waits for pay's answer, and then let pay drop the connection."""
    deadline = time.monotonic() + longest
    while time.monotonic() < deadline:
        if any(held.get("order") == claim.order for held in _control("pay", "GET", "waiting")["waiting"]):
            _kill(claim)
            break
        time.sleep(0.2)
    _control("pay", "POST", "release", {"drop": True})


def _kill(claim: Claim) -> None:
    operation = Operation.objects.get(key=claim.key("issue_refund"))
    worker = Worker.objects.get(name=operation.lease_owner)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    log.info("worker_killed", worker=worker.name, claim=claim.id)
