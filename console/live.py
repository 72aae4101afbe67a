"""Parts of pages that keep themselves up to date: a request for the part alone gets it, or 304 when nothing changed."""

import hashlib
import re
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string

# What differs between two drawings of the same facts.
_CHANCE = re.compile(r'name="(?:csrfmiddlewaretoken|token)" value="[^"]*"')


def answer(request: HttpRequest, *, page: str, part: str, facts: dict[str, Any], status: int = 200) -> HttpResponse:
    """Render `page`, or its live part when htmx asks. Both views of a page share permissions and queries."""
    if not request.htmx or request.htmx.boosted:  # type: ignore[attr-defined]
        return render(request, page, facts, status=status)
    text = render_to_string(part, facts, request=request)
    tag = hashlib.sha256(_CHANCE.sub("", text).encode()).hexdigest()[:24]
    response = HttpResponse(status=304) if request.headers.get("HX-PTag") == tag else HttpResponse(text)
    response.headers["HX-PTag"] = tag
    response.headers["Vary"] = "HX-Request"
    response.headers["Cache-Control"] = "no-store"
    return response
