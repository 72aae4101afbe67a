"""Coming in and, in the example, being somebody else."""

from allauth.account.utils import perform_login
from django.conf import settings
from django.contrib.auth import login
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from console import access, example, sign_in

BACKEND = "django.contrib.auth.backends.ModelBackend"


@never_cache
def sign_in_link(request: HttpRequest, token: str) -> HttpResponse:
    """A page with one button; only the button's POST uses the link up. A second factor is still asked for."""
    user = sign_in.use(token) if request.method == "POST" else None
    if user is not None:
        return perform_login(request, user, redirect_url="/")
    usable = request.method != "POST" and sign_in.is_usable(token)
    return render(request, "sign_in_link.html", {"usable": usable}, status=200 if usable else 410)


@require_safe
def no_reset(request: HttpRequest) -> HttpResponse:
    """In the place of allauth's reset by mail."""
    return render(request, "no_reset.html")


@require_POST
@login_required
def switch(request: HttpRequest) -> HttpResponse:
    """Become another person of the example. Outside the example there is no such address."""
    name = request.POST.get("person", "")
    if not settings.AFTERCALL_EXAMPLE or name not in example.PEOPLE or request.user.username not in example.PEOPLE:
        raise Http404(access.NOT_FOUND)
    login(request, User.objects.get(username=name), backend=BACKEND)
    to = request.POST.get("next", "/")
    return redirect(to if url_has_allowed_host_and_scheme(to, allowed_hosts=None) else "/")
