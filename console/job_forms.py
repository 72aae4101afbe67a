"""What the pages of schedules send. Forms read and check the shape; what is allowed is decided behind the door."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.core import signing
from django.utils.crypto import salted_hmac

from console.forms import LAST_VERSION, LONGEST_REASON
from reconciliation import job_wording, jobs, occurrences
from reconciliation.jobs import Terms

_LENGTHS = "Such as 15 min, 2 h or 1 d; empty means no limit."


class LengthField(forms.CharField):
    """A length of time: 90 s, 15 min, 2 h, 1 d; empty for none."""

    def __init__(self, **more: Any) -> None:
        super().__init__(required=False, max_length=20, **more)

    def clean(self, value: Any) -> Any:
        """The timedelta, or None."""
        text = super().clean(value).strip()
        if not text:
            return None
        match = re.fullmatch(r"(\d{1,7}) ?(s|min|h|d)", text)
        if not match:
            raise forms.ValidationError("A length looks like 90 s, 15 min, 2 h or 1 d; empty means no limit.")
        return timedelta(seconds=int(match[1]) * occurrences.UNITS[match[2]])

    def prepare_value(self, value: Any) -> Any:
        """As it is typed."""
        if not isinstance(value, timedelta):
            return value
        seconds = int(value.total_seconds())
        unit = next(name for name, size in reversed(occurrences.UNITS.items()) if seconds % size == 0)
        return f"{seconds // occurrences.UNITS[unit]} {unit}"


class JobForm(forms.Form):
    """The terms of a schedule. `seen` is there once their times were shown, and counts for exactly these terms."""

    kind = forms.ChoiceField(label="Repeats", choices=(("cron", "by the clock (cron)"), ("interval", "every so often")))
    expression = forms.CharField(
        max_length=120,
        label="Expression",
        help_text="Cron: minute hour day month weekday, such as 30 2 * * *. Every so often: 15 min, 2 h, 1 d.",
    )
    zone = forms.CharField(
        max_length=64,
        label="Time zone",
        help_text="Cron follows the wall clock of this zone; an interval keeps real time in any.",
        widget=forms.TextInput(attrs={"list": "zones", "autocomplete": "off"}),
    )
    workflow = forms.ChoiceField(label="Workflow")
    input = forms.CharField(
        max_length=20_000,
        required=False,
        label="Input",
        help_text='One JSON object, such as {"order": "1002"}; empty where the workflow needs none.',
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false", "class": "mono"}),
    )
    missed = forms.ChoiceField(label="If starts were missed", choices=tuple(job_wording.MISSED_POLICIES.items()))
    repeats_accepted = forms.BooleanField(
        required=False,
        label="Run every missed start although an action has no key",
        help_text="Without a key that the provider remembers, each run acts once more. Another person must agree.",
    )
    max_catch_up = LengthField(label="Catch up on the last", help_text=f"{_LENGTHS} Older missed starts are never run.")
    overlap = forms.ChoiceField(label="If one still goes on", choices=tuple(job_wording.OVERLAP_POLICIES.items()))
    start_deadline = LengthField(label="Start at most so late", help_text=f"{_LENGTHS} A later start is not made.")
    max_run_time = LengthField(label="Longest run", help_text=f"{_LENGTHS} A run beyond this waits for a person.")
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True, label="Reason, for the audit log")
    token = forms.UUIDField(widget=forms.HiddenInput)
    version = forms.IntegerField(min_value=0, max_value=LAST_VERSION, widget=forms.HiddenInput)
    seen = forms.CharField(max_length=300, required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, workflows: list[str], about: str = "", **more: Any) -> None:
        self._salt = f"times of a schedule {about}"
        super().__init__(*args, **{"label_suffix": "", **more})
        self.fields["workflow"].choices = [(name, name) for name in workflows]  # type: ignore[attr-defined]

    def clean_input(self) -> Any:
        """The object, or None for what is there already."""
        text = self.cleaned_data["input"].strip()
        if not text:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise forms.ValidationError('The input is one JSON object, such as {"order": "1002"}.')
        return value

    def terms(self) -> Terms:
        """What the form would have saved."""
        return Terms(**{name: self.cleaned_data[name] for name in Terms.__dataclass_fields__})

    def show(self, *, anchor: datetime, **anew: str) -> None:
        """Let the form that is drawn carry that the times of its terms are shown; `anew` are other values for it."""
        self.cleaned_data |= anew
        data = self.data.copy()  # type: ignore[attr-defined]
        for name, value in anew.items():
            data[name] = value
        data["seen"] = signing.dumps([self._digest(), anchor.isoformat()], salt=self._salt)
        self.data = data

    def seen_from(self) -> datetime | None:
        """The anchor of the times that were shown of exactly these terms; None where they were not shown.

        Save is the first button of the form, so Enter in a field that was changed since presses it.
        """
        try:
            digest, anchor = signing.loads(self.cleaned_data["seen"], salt=self._salt)
        except signing.BadSignature:
            return None
        return datetime.fromisoformat(anchor) if digest == self._digest() else None

    def _digest(self) -> str:
        """Keyed, for an input may be guessed."""
        terms = {name: str(value) for name, value in self.cleaned_data.items() if name not in _NO_TERMS}
        return salted_hmac(self._salt, json.dumps(terms, sort_keys=True)).hexdigest()


_NO_TERMS = ("reason", "token", "seen")


class NewJobForm(JobForm):
    """The same for a schedule that is not there yet."""

    tenant = forms.ChoiceField(label="Tenant")
    name = forms.CharField(max_length=80, label="Name", help_text="Part of each run's id; it never changes.")
    field_order = ("tenant", "name")

    def __init__(self, *args: Any, tenants: list[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self.fields["tenant"].choices = [(slug, slug) for slug in tenants]  # type: ignore[attr-defined]

    def clean_name(self) -> str:
        """A name that can be part of a run's id."""
        name: str = self.cleaned_data["name"]
        if not jobs.usable(name):
            raise forms.ValidationError(jobs.NAME_RULE)
        return name


class RunNowForm(forms.Form):
    """A press on a schedule's page."""

    action = forms.ChoiceField(choices=[(name, name) for name in ("enable", "disable", "fill", "new_intent", "answer")])
    token = forms.UUIDField()
    version = forms.IntegerField(min_value=1, max_value=LAST_VERSION)
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True)
    slot = forms.CharField(max_length=20, required=False)
    at = forms.CharField(max_length=40, required=False)
    run = forms.CharField(max_length=10, required=False)
