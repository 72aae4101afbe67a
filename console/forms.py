"""What pages send. Forms read and check the shape; what is allowed is decided behind the door."""

from __future__ import annotations

from datetime import date
from typing import Any

from django import forms
from django.core.validators import MaxValueValidator, MinValueValidator

from reconciliation.actions import Press
from reconciliation.deeds import LONGEST_REASON
from reconciliation.limits import KINDS, Wanted

LAST_VERSION = 2**31 - 1  # that the database can count; no page shows a later one
_INPUT = "input_"
_DAYS = [MinValueValidator(date(1970, 1, 1)), MaxValueValidator(date(9000, 1, 1))]  # beyond, a zone's offset overflows


class PressForm(forms.Form):
    """One press of one button: every form carries its one-time token and the version that it was drawn with."""

    action = forms.CharField(max_length=40)
    token = forms.UUIDField()
    version = forms.IntegerField(min_value=1, max_value=LAST_VERSION)
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True)

    def clean_reason(self) -> str:
        """A reason that nobody can see is none."""
        reason: str = self.cleaned_data["reason"]
        return reason if any(sign.isprintable() and not sign.isspace() for sign in reason) else ""

    def clean(self) -> dict[str, Any]:
        """The further inputs differ from action to action; what none of them may hold is refused here."""
        if any("\0" in value for name, value in self.data.items() if name.startswith(_INPUT)):
            self.add_error(None, "NUL")
        return super().clean() or {}

    def press(self) -> Press:
        """The press that the form carries."""
        clean = self.cleaned_data
        inputs = {k.removeprefix(_INPUT): v.strip()[:200] for k, v in self.data.items() if k.startswith(_INPUT)}
        return Press(
            action=clean["action"],
            token=clean["token"],
            version=clean["version"],
            reason=clean["reason"],
            inputs=inputs,
        )

    def problem(self) -> str:
        """What is wrong with the form, for the person who sent it."""
        if self.has_error("reason", "max_length"):
            return f"The reason is longer than {LONGEST_REASON} characters. Nothing was done."
        if "reason" in self.errors or self.non_field_errors():
            return "What was typed holds a character that cannot be kept (NUL). Nothing was done."
        missing = " and ".join(name for name in ("action", "version", "token") if name in self.errors)
        return f"The form came without a usable {missing}, so nothing was done. Open the page again and press there."


class LiftForm(forms.Form):
    """The release of a stop switch or limit, as it was drawn."""

    token = forms.UUIDField()
    version = forms.IntegerField(min_value=1, max_value=LAST_VERSION)
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True)

    def problem(self) -> str:
        """What is wrong with the form, for the person who sent it."""
        return "The form cannot be read, so nothing was done. Open the page again and press there."


class ChangeLimitForm(LiftForm):
    """Another number for a limit, as it was drawn."""

    most = forms.CharField(required=False)

    def clean_most(self) -> int | None:
        """None where it is no number that the database can count: the door says so, and what was typed is kept."""
        written = self.cleaned_data["most"]
        number = int(written) if written.isascii() and written.isdigit() and len(written) < 20 else 0
        return number if 0 < number < 2**63 else None


class FenceForm(forms.Form):
    """A decision about the restore fence, as it was drawn."""

    deed = forms.CharField(max_length=12)
    token = forms.UUIDField()
    version = forms.IntegerField(min_value=0, max_value=LAST_VERSION)
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True)


class LimitForm(forms.Form):
    """A stop switch or a limit to be. What is left empty covers everything."""

    kind = forms.ChoiceField(choices=[(kind, kind) for kind in KINDS])
    token = forms.UUIDField()
    tenant = forms.CharField(max_length=64, required=False)
    provider = forms.CharField(max_length=64, required=False, strip=True)
    action = forms.CharField(max_length=120, required=False, strip=True)
    workflow_type = forms.CharField(max_length=200, required=False, strip=True)
    currency = forms.CharField(max_length=8, required=False, strip=True)
    most = forms.IntegerField(min_value=1, required=False)
    window_seconds = forms.IntegerField(min_value=1, required=False)
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True)

    def wanted(self) -> Wanted:
        """The limit that the form asks for."""
        names = ("kind", "tenant", "provider", "action", "workflow_type", "currency", "most", "window_seconds")
        return Wanted(**{name: self.cleaned_data[name] for name in names})

    def typed(self) -> dict[str, str]:
        """What was written, as it was written, for a form that comes back."""
        return {name: self.data.get(name, "").replace("\0", "\ufffd") for name in self.fields if name != "token"}

    @property
    def is_of_page(self) -> bool:
        """Whether it came from the page, whatever a person wrote into it: no person writes its kind or its token."""
        return "kind" not in self.errors and "token" not in self.errors

    def problem(self) -> str:
        """What is wrong with the form, for the person who sent it."""
        return f"{' '.join(_wrong(self, name) for name in self.errors)} Nothing was set."


_LIMIT_LABELS = {"workflow_type": "Workflow", "most": "At most", "window_seconds": "Window"}


def _wrong(form: LimitForm, name: str) -> str:
    label = _LIMIT_LABELS.get(name, name.capitalize())
    if name in ("most", "window_seconds"):
        unit = "seconds" if name == "window_seconds" else "calls or minor units (4200 is 42.00)"
        return f"“{label}” cannot be read: it is a whole number above 0, in {unit}."
    if form.has_error(name, "max_length"):
        return f"“{label}” is longer than {form.fields[name].max_length} characters."  # type: ignore[attr-defined]
    if form.has_error(name, "null_characters_not_allowed"):
        return f"“{label}” holds a character that cannot be kept (NUL)."
    return f"The form came without a usable {name}."


class AuditForm(forms.Form):
    """Filters of the audit page. Days are days in the reader's zone; the last one is included."""

    tenant = forms.CharField(max_length=64, required=False)
    first = forms.DateField(required=False, validators=_DAYS)
    last = forms.DateField(required=False, validators=_DAYS)
    subject = forms.CharField(max_length=120, required=False)
    actor = forms.CharField(max_length=200, required=False)
    event = forms.CharField(max_length=64, required=False)
    reason_code = forms.CharField(max_length=120, required=False)
    batch = forms.CharField(max_length=120, required=False)

    def clean(self) -> dict[str, Any]:
        """A range that ends before it begins is a slip, not an empty answer."""
        clean = super().clean() or {}
        if clean.get("first") and clean.get("last") and clean["last"] < clean["first"]:
            raise forms.ValidationError("The last day lies before the first.")
        return clean
