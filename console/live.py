"""Parts of pages that keep themselves up to date: a request for the part alone gets it, or 304 when nothing changed."""

import hashlib
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_required
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.template.loader import render_to_string

from console.views import errors

# What differs between two drawings of the same facts.
_CHANCE = re.compile(r'name="(?:csrfmiddlewaretoken|token)" value="[^"]*"')


View = Callable[..., HttpResponseBase]


def signed_in(view: View) -> View:
    """Lead a stranger to the sign-in page.

    The live part of a page that is open is told 401 instead: the page says so and keeps what is being typed in it.
    PostgreSQL keeps no NUL, so an address that holds one is refused before anything is asked of it. One that takes
    only presses says so in words where it is opened.
    """
    led = login_required(view)

    @wraps(view)
    def inner(request: HttpRequest, *args: Any, **parts: Any) -> HttpResponseBase:
        if "%00" in request.META.get("QUERY_STRING", ""):
            raise BadRequest("The address holds a character that no name, number or day has.")
        if request.headers.get("HX-Request") and not request.user.is_authenticated:
            return HttpResponse("You are signed out.\n", status=401, content_type="text/plain")
        response = led(request, *args, **parts)
        # Who signs in after a press, or reloads the answer to one, comes to its address without the press.
        return errors.only_pressed(request) if response.status_code == 405 and request.method == "GET" else response

    return inner


def answer(request: HttpRequest, *, page: str, part: str, facts: dict[str, Any], status: int = 200) -> HttpResponse:
    """Render `page`, or its live part when htmx asks. Both views of a page share permissions and queries."""
    if not request.htmx or request.htmx.boosted:  # type: ignore[attr-defined]
        whole = render(request, page, facts, status=status)
        whole.headers["Cache-Control"] = "no-store"  # what a person may see stays in no cache after they sign out
        return whole
    text = render_to_string(part, facts, request=request)
    tag = hashlib.sha256(_CHANCE.sub("", text).encode()).hexdigest()[:24]
    response = HttpResponse(status=304) if request.headers.get("HX-PTag") == tag else HttpResponse(text)
    response.headers["HX-PTag"] = tag
    response.headers["Vary"] = "HX-Request"
    response.headers["Cache-Control"] = "no-store"
    return response
