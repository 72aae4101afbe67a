"""The clock of the product, the audit log's tables, their one way in, and what keeps them append-only."""

from typing import Any

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

CLOCK = """
-- The single clock of the product: read at the moment of the call (now() would be the transaction's start, which is
-- wrong after a wait for a lock). Only a test database may replace it.
CREATE FUNCTION public.aftercall_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS 'SELECT pg_catalog.clock_timestamp()';
"""

CHECKS = r"""
-- These names stand unescaped in the canonical bytes, so nothing that JSON would escape may be in them.
ALTER TABLE public.audit_entry
  ADD CONSTRAINT audit_entry_subject_form CHECK (subject ~ '^[a-z0-9_:.-]+$' AND length(subject) <= 120),
  ADD CONSTRAINT audit_entry_tenant_form CHECK (tenant ~ '^[a-z0-9_.:-]+$' AND length(tenant) <= 64),
  ADD CONSTRAINT audit_entry_event_form CHECK (event ~ '^[a-z0-9_.:-]+$' AND length(event) <= 64),
  ADD CONSTRAINT audit_entry_from_form CHECK (from_state ~ '^[a-z0-9_.:-]+$' AND length(from_state) <= 64),
  ADD CONSTRAINT audit_entry_to_form CHECK (to_state ~ '^[a-z0-9_.:-]+$' AND length(to_state) <= 64),
-- Numbers within a subject start at 1: a cut head shows.
  ADD CONSTRAINT audit_entry_seq_starts CHECK (seq >= 1),
-- An entry without an actor or a reason is no record of a decision.
  ADD CONSTRAINT audit_entry_actor_form CHECK (length(actor) BETWEEN 1 AND 200),
  ADD CONSTRAINT audit_entry_actor_kind_known CHECK (actor_kind IN ('person', 'system', 'worker', 'agent')),
  ADD CONSTRAINT audit_entry_reason_code_form CHECK (length(reason_code) BETWEEN 1 AND 120),
-- SHA-256 of the canonical bytes.
  ADD CONSTRAINT audit_entry_hash_length CHECK (octet_length(hash) = 32);
"""

APPEND = r"""
-- The only way in. Runs as the owner, so that the application role needs no INSERT and cannot forge ids, times, numbers
-- or hashes. The search path is pinned, so that no object of the caller's can stand in for one that is used here.
CREATE FUNCTION public.audit_append(
  p_subject text, p_tenant text, p_event text, p_from text, p_to text, p_version int, p_body text,
  p_openings jsonb DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  -- Refuses a text that is not one JSON value, and so one that would break out of its place in the record.
  v_body jsonb := p_body::jsonb;
  v_seq int;
  v_prev bytea;
  v_at timestamptz;
  v_canonical bytea;
  v_id bigint;
BEGIN
  -- Two writers about one subject take turns until the first has committed; the reads below come after the wait.
  PERFORM pg_advisory_xact_lock(hashtextextended(p_subject, 8785));
  SELECT seq, hash INTO v_seq, v_prev FROM public.audit_entry WHERE subject = p_subject ORDER BY seq DESC LIMIT 1;
  v_seq := coalesce(v_seq, 0) + 1;
  v_at := public.aftercall_now();
  v_canonical := convert_to(
    '{"at":"' || to_char(v_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
    || '","body":' || p_body
    || ',"event":"' || p_event
    || '","from":' || coalesce('"' || p_from || '"', 'null')
    || ',"prev":"' || coalesce(encode(v_prev, 'hex'), '')
    || '","seq":' || v_seq
    || ',"subject":"' || p_subject
    || '","tenant":"' || p_tenant
    || '","to":' || coalesce('"' || p_to || '"', 'null')
    || ',"v":1,"version":' || coalesce(p_version::text, 'null') || '}', 'UTF8');
  INSERT INTO public.audit_entry (subject, seq, tenant, at, event, from_state, to_state, version, actor, actor_kind,
    on_behalf_of, reason_code, batch, canonical, hash)
  VALUES (p_subject, v_seq, p_tenant, v_at, p_event, p_from, p_to, p_version, v_body->>'actor', v_body->>'actor_kind',
    v_body->>'on_behalf_of', v_body->>'reason_code', v_body->>'batch', v_canonical, sha256(v_canonical))
  RETURNING id INTO v_id;
  IF p_openings IS NOT NULL THEN
    PERFORM public.audit_open(v_id, v_body->'commitments', p_openings);
  END IF;
  RETURN v_id;
END $$;

-- Keeps what the commitments of an entry stand for. An opening that does not open its commitment is refused here, where
-- the writer can still be told.
CREATE FUNCTION public.audit_open(p_entry bigint, p_commitments jsonb, p_openings jsonb)
RETURNS void LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_opening record;
BEGIN
  FOR v_opening IN
    SELECT o->>'field' AS field, decode(o->>'salt', 'hex') AS salt, o->>'value' AS value
    FROM jsonb_array_elements(p_openings) AS o
  LOOP
    IF encode(sha256(v_opening.salt || convert_to(v_opening.value, 'UTF8')), 'hex')
        IS DISTINCT FROM p_commitments->>v_opening.field THEN
      RAISE EXCEPTION 'The opening of % does not open its commitment.', v_opening.field USING ERRCODE = '23514';
    END IF;
    INSERT INTO public.audit_opening (entry_id, field, salt, value)
    VALUES (p_entry, v_opening.field, v_opening.salt, v_opening.value);
  END LOOP;
END $$;
"""

APPEND_ONLY = """
-- Grants bind the application role; the triggers bind the owner too, until somebody who may do so disables them.
CREATE FUNCTION public.audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% is append-only: % refused.', TG_TABLE_NAME, TG_OP USING ERRCODE = '42501';
END $$;
CREATE TRIGGER audit_entry_no_change BEFORE UPDATE OR DELETE ON public.audit_entry
  FOR EACH ROW EXECUTE FUNCTION public.audit_refuse();
CREATE TRIGGER audit_opening_no_change BEFORE UPDATE OR DELETE ON public.audit_opening
  FOR EACH ROW EXECUTE FUNCTION public.audit_refuse();
-- A row trigger does not see TRUNCATE.
CREATE TRIGGER audit_entry_no_truncate BEFORE TRUNCATE ON public.audit_entry
  FOR EACH STATEMENT EXECUTE FUNCTION public.audit_refuse();
CREATE TRIGGER audit_opening_no_truncate BEFORE TRUNCATE ON public.audit_opening
  FOR EACH STATEMENT EXECUTE FUNCTION public.audit_refuse();
"""

NO_ROLE = (
    "The role {role} does not exist. It is the role that the application works as; create it before migrating "
    "(CREATE ROLE {role} LOGIN), or name another in AFTERCALL_APP_ROLE."
)


def grant(apps: Any, schema_editor: Any) -> None:
    """The application role reads and calls audit_append; it has no other right here, and nobody else has any."""
    role = getattr(settings, "AFTERCALL_APP_ROLE", "aftercall_app")
    name = schema_editor.quote_name(role)
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role])
        if cursor.fetchone() is None:
            raise RuntimeError(NO_ROLE.format(role=role))
    append = "FUNCTION public.audit_append(text, text, text, text, text, int, text, jsonb)"
    for statement in (
        f"REVOKE ALL ON public.audit_entry, public.audit_opening FROM PUBLIC, {name}",
        f"REVOKE ALL ON {append} FROM PUBLIC",
        "REVOKE ALL ON FUNCTION public.audit_open(bigint, jsonb, jsonb) FROM PUBLIC",
        f"GRANT SELECT ON public.audit_entry, public.audit_opening TO {name}",
        f"GRANT EXECUTE ON {append} TO {name}",
    ):
        schema_editor.execute(statement)


def text(**options: Any) -> Any:
    return models.TextField(db_collation="C", **options)


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.RunSQL(CLOCK, "DROP FUNCTION public.aftercall_now()"),
        migrations.CreateModel(
            name="Entry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("subject", text()),
                ("seq", models.IntegerField()),
                ("tenant", text()),
                ("at", models.DateTimeField()),
                ("event", text()),
                ("from_state", text(null=True)),
                ("to_state", text(null=True)),
                ("version", models.IntegerField(null=True)),
                ("actor", text()),
                ("actor_kind", text()),
                ("on_behalf_of", text(null=True)),
                ("reason_code", text()),
                ("batch", text(null=True)),
                ("canonical", models.BinaryField()),
                ("hash", models.BinaryField()),
            ],
            options={
                "db_table": "audit_entry",
                "constraints": [models.UniqueConstraint(fields=("subject", "seq"), name="audit_entry_subject_seq")],
                "indexes": [
                    models.Index("tenant", models.OrderBy(models.F("id"), descending=True), name="audit_entry_page"),
                    models.Index("tenant", "at", "id", name="audit_entry_time"),
                    models.Index("tenant", "actor", "id", name="audit_entry_actor"),
                    models.Index("batch", condition=models.Q(batch__isnull=False), name="audit_entry_batch"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Opening",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("field", text()),
                ("salt", models.BinaryField()),
                ("value", models.TextField()),
                (
                    "entry",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="openings",
                        to="audit.entry",
                    ),
                ),
            ],
            options={
                "db_table": "audit_opening",
                "constraints": [models.UniqueConstraint(fields=("entry", "field"), name="audit_opening_entry_field")],
            },
        ),
        migrations.RunSQL(CHECKS, migrations.RunSQL.noop),
        migrations.RunSQL(APPEND, "DROP FUNCTION public.audit_append; DROP FUNCTION public.audit_open"),
        migrations.RunSQL(APPEND_ONLY, "DROP FUNCTION public.audit_refuse CASCADE"),
        migrations.RunPython(grant, migrations.RunPython.noop),
    ]
