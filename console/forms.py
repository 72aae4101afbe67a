"""What pages send. Forms read and check the shape; what is allowed is decided behind the door."""

from __future__ import annotations

from typing import Any

from django import forms

from reconciliation.actions import Press

LONGEST_REASON = 2000
_INPUT = "input_"


class PressForm(forms.Form):
    """One press of one button: every form carries its one-time token and the version that it was drawn with."""

    action = forms.CharField(max_length=40)
    token = forms.UUIDField()
    version = forms.IntegerField(min_value=1)
    reason = forms.CharField(max_length=LONGEST_REASON, required=False, strip=True)

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
        if "reason" in self.errors:
            return f"The reason is longer than {LONGEST_REASON} characters. Nothing was done."
        missing = " and ".join(name for name in ("action", "version", "token") if name in self.errors)
        return f"The form came without a usable {missing}, so nothing was done. Open the page again and press there."


class AuditForm(forms.Form):
    """Filters of the audit page. Days are days in the reader's zone; the last one is included."""

    tenant = forms.CharField(max_length=64, required=False)
    first = forms.DateField(required=False)
    last = forms.DateField(required=False)
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
