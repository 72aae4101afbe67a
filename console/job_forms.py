"""What the pages of schedules send. Forms read and check the shape; what is allowed is decided behind the door."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

from django import forms

from console.forms import LONGEST_REASON
from reconciliation import jobs, occurrences, wording
from reconciliation.jobs import Terms


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
    """The terms of a schedule. `confirm` is there once the times were shown."""

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
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false", "class": "mono"}),
    )
    missed = forms.ChoiceField(label="If starts were missed", choices=tuple(wording.MISSED_POLICIES.items()))
    repeats_accepted = forms.BooleanField(
        required=False,
        label="Run every missed start although an action has no key",
        help_text="Without a key that the provider remembers, each run acts once more. Another person must agree.",
    )
    max_catch_up = LengthField(label="Catch up on the last", help_text="Older missed starts are never run.")
    overlap = forms.ChoiceField(label="If one still goes on", choices=tuple(wording.OVERLAP_POLICIES.items()))
    start_deadline = LengthField(label="Start at most so late", help_text="A later start is not made.")
    max_run_time = LengthField(label="Longest run", help_text="A run beyond this waits for a person.")
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True, label="Reason, for the audit log")
    token = forms.UUIDField(widget=forms.HiddenInput)
    version = forms.IntegerField(min_value=0, widget=forms.HiddenInput)

    def __init__(self, *args: Any, workflows: list[str], **more: Any) -> None:
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
    version = forms.IntegerField(min_value=1)
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True)
    slot = forms.CharField(max_length=20, required=False)
    run = forms.CharField(max_length=10, required=False)
