"""The entry of a birth needs neither the lock on its subject nor the search for the entry before it.

All else about `audit_append` is as it was.
"""

from django.db import migrations

APPEND = r"""
CREATE OR REPLACE FUNCTION public.audit_append(
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
  v_waited text;
BEGIN
  -- A birth has nothing before it, and nobody else sees its subject yet: what is numbered 1 twice is refused.
  IF p_event <> 'transition' OR p_from IS NOT NULL OR p_version IS DISTINCT FROM 1 THEN
    -- Two writers about one subject take turns until the first has committed; the reads below come after the wait.
    v_waited := pg_advisory_xact_lock(hashtextextended(p_subject, 8785));
    SELECT seq, hash INTO v_seq, v_prev FROM public.audit_entry WHERE subject = p_subject ORDER BY seq DESC LIMIT 1;
  END IF;
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
"""


class Migration(migrations.Migration):
    dependencies = [("audit", "0002_entry_holds")]
    operations = [migrations.RunSQL(APPEND, migrations.RunSQL.noop)]
