"""One URL a verb."""

from django.urls import include, path

from console.views import (
    approvals,
    audit,
    cases,
    errors,
    health,
    limits,
    outbox,
    people,
    queue,
    restore,
    runs,
    schedules,
)

urlpatterns = [
    path("", queue.queue, name="queue"),
    path("operations/<int:pk>", cases.case, name="case"),
    path("operations/<int:pk>/act", cases.act, name="case_act"),
    path("runs", runs.runs, name="runs"),
    path("runs/<int:pk>", runs.run, name="run"),
    path("runs/<int:pk>/act", runs.act, name="run_act"),
    path("approvals", approvals.approvals, name="approvals"),
    path("approvals/<int:pk>", approvals.approval, name="approval"),
    path("approvals/<int:pk>/act", approvals.act, name="approval_act"),
    path("schedules", schedules.schedules, name="schedules"),
    path("schedules/new", schedules.new, name="schedule_new"),
    path("schedules/<int:pk>", schedules.schedule, name="schedule"),
    path("schedules/<int:pk>/edit", schedules.edit, name="schedule_edit"),
    path("schedules/<int:pk>/act", schedules.act, name="schedule_act"),
    path("audit", audit.entries, name="audit"),
    path("audit/<int:pk>", audit.entry, name="audit_entry"),
    path("audit/export", audit.export, name="audit_export"),
    path("health", health.health, name="health"),
    path("limits", limits.limits, name="limits"),
    path("limits/set", limits.set_limit, name="limit_set"),
    path("limits/<int:pk>/lift", limits.lift, name="limit_lift"),
    path("limits/<int:pk>/change", limits.change, name="limit_change"),
    path("restore", restore.restore, name="restore"),
    path("restore/act", restore.act, name="restore_act"),
    path("stops", limits.stops, name="stops"),
    path("outbox", outbox.outbox, name="outbox"),
    path("outbox/<int:pk>/release", outbox.release, name="message_release"),
    path("outbox/<int:pk>/discard", outbox.discard, name="message_discard"),
    path("healthz", health.healthz, name="healthz"),
    path("sign-in/<str:token>", people.sign_in_link, name="sign_in_link"),
    path("example/switch", people.switch, name="switch"),
    path("accounts/password/reset/", people.no_reset, name="account_reset_password"),
    path("accounts/", include("allauth.urls")),
]

handler400 = errors.bad_request
handler403 = errors.forbidden
handler404 = errors.not_found
handler500 = errors.server_error
