-- The functions through which transition.py, and nothing else, writes operations, runs and the journal.
-- They run with the owner's rights; the application role has no right of its own to change these tables.
-- Lock order everywhere: run, then operation, then the audit subject. Time is read after the locks are held.

-- Patches name columns. p_patch holds values, p_after seconds from now, p_once seconds from now for columns still null.
CREATE OR REPLACE FUNCTION ledger_patch(p_row jsonb, p_patch jsonb, p_after jsonb, p_once jsonb, p_now timestamptz)
RETURNS jsonb LANGUAGE plpgsql STABLE SET search_path = public, pg_temp AS $$
BEGIN
    RETURN coalesce(p_patch, '{}') || coalesce((
        SELECT jsonb_object_agg(a.key, p_now + a.value::numeric * interval '1 second')
          FROM jsonb_each_text(coalesce(p_after, '{}')) AS a), '{}') || coalesce((
        SELECT jsonb_object_agg(a.key, p_now + a.value::numeric * interval '1 second')
          FROM jsonb_each_text(coalesce(p_once, '{}')) AS a WHERE p_row->>a.key IS NULL), '{}');
END $$;

-- The caller holds a lock on the row that the entries are about, or has just inserted it: that is why no foreign key asks
-- again at every commit. Who would delete the row from under its journal is refused by references_are_kept().
CREATE OR REPLACE FUNCTION ledger_journal(p_operation bigint, p_run bigint, p_now timestamptz, p_entries jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_entry jsonb;
BEGIN
    FOR v_place IN 0 .. jsonb_array_length(p_entries) - 1 LOOP
        v_entry := p_entries->v_place;
        INSERT INTO reconciliation_journalentry
            (operation_id, run_id, at, kind, attempt, generation, observer, data, sealed)
        VALUES (p_operation, p_run, p_now, v_entry->>'kind', (v_entry->>'attempt')::int, (v_entry->>'generation')::int,
                coalesce(v_entry->>'observer', ''), coalesce(v_entry->>'data', '{}'), coalesce(v_entry->>'sealed', ''));
    END LOOP;
END $$;

-- Whether a worker that had lost its claim said that the call was applied.
CREATE OR REPLACE FUNCTION ledger_applied_reported(p_operation bigint)
RETURNS boolean LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT 1 FROM reconciliation_journalentry j WHERE j.operation_id = p_operation
                   AND j.kind = 'late_report' AND j.data::jsonb->>'status' = 'applied');
$$;

-- Whether what a worker reports leaves it possible that its call was applied.
CREATE OR REPLACE FUNCTION ledger_may_be_applied(p_report jsonb)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(p_report->>'status', '') <> '' AND p_report->>'error_class' IS NULL
        OR p_report->>'error_class' IN ('unknown', 'key_in_use');
$$;

-- Whether a late report casts doubt on what is called not applied, and nobody has judged it yet: one that says applied,
-- or one that does not say "not applied" and came after the newest look-up.
CREATE OR REPLACE FUNCTION ledger_doubted(p_operation bigint)
RETURNS boolean LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT 1 FROM reconciliation_journalentry j WHERE j.operation_id = p_operation
        AND j.kind = 'late_report' AND ledger_may_be_applied(j.data::jsonb)
        AND NOT EXISTS (SELECT 1 FROM reconciliation_journalentry f WHERE f.operation_id = p_operation
            AND f.kind = 'finding' AND f.id > j.id
            AND (f.data::jsonb->>'from_report' = 'true' OR j.data::jsonb->>'status' IS DISTINCT FROM 'applied')));
$$;

-- 'newer_sent' where a newer operation with the same action on the same business object was sent.
CREATE OR REPLACE FUNCTION ledger_newer_sent(p_op reconciliation_operation)
RETURNS text LANGUAGE plpgsql STABLE SET search_path = public, pg_temp AS $$
BEGIN
    PERFORM 1 FROM reconciliation_operation n
      WHERE n.tenant = p_op.tenant AND n.business_object = p_op.business_object AND n.id > p_op.id
        AND n.provider = p_op.provider AND n.account = p_op.account AND n.action = p_op.action
        AND n.first_sent_at IS NOT NULL;
    RETURN CASE WHEN FOUND THEN 'newer_sent' END;
END $$;

-- Whether a run lets one of its steps be sent: forward steps while it goes forward, undo steps while it walks back,
-- both under its lease; and, after its end, an undo that a person asks for by itself (no lease: p_generation NULL). That
-- one was born after the end (p_born, NULL: now); what its walk back left behind is not sent any more.
CREATE OR REPLACE FUNCTION ledger_run_lets(
    p_run reconciliation_run, p_undo boolean, p_generation int, p_born timestamptz
)
RETURNS boolean LANGUAGE sql IMMUTABLE SET search_path = public, pg_temp AS $$
    SELECT coalesce(CASE
        WHEN p_generation IS NULL THEN p_undo AND p_run.settled_at <= coalesce(p_born, p_run.settled_at)
        ELSE p_run.generation = p_generation AND p_run.state = CASE WHEN p_undo THEN 'compensating' ELSE 'running' END
    END, false);
$$;

-- Whether two people vouched for this undo: it counts as done, and is neither sent nor asked for any more.
CREATE OR REPLACE FUNCTION ledger_waived(p_run reconciliation_run, p_step text)
RETURNS boolean LANGUAGE sql IMMUTABLE SET search_path = public, pg_temp AS $$
    SELECT substr(p_step, 6) = ANY (p_run.waived);  -- after "undo:"
$$;

-- Whether no other run has to itself what this one works on. Who asks has it until the transaction ends, so that of two
-- that reach for it at the same moment the second sees the first.
CREATE OR REPLACE FUNCTION ledger_lock_free(p_run reconciliation_run)
RETURNS boolean LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    IF coalesce(p_run.lock, '') = '' OR p_run.lock_held THEN
        RETURN true;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('lock:' || p_run.tenant || ':' || p_run.lock, 0));
    RETURN NOT EXISTS (SELECT 1 FROM reconciliation_run o
                        WHERE o.tenant = p_run.tenant AND o.lock = p_run.lock AND o.lock_held);
END $$;

-- Journal alone: what was observed, where nothing is decided by it.
CREATE OR REPLACE FUNCTION ledger_note(p_operation bigint, p_run bigint, p_entries jsonb, p_due_now boolean)
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz;
    v_there boolean;
BEGIN
    -- Locked, so that a pruning is over or comes after this, and a report that is due is seen whole or not yet by a claim
    -- or a settlement. What is looked for below is looked for after the wait.
    IF p_operation IS NULL THEN
        PERFORM 1 FROM reconciliation_run WHERE id = p_run FOR KEY SHARE;
    ELSIF p_due_now THEN
        PERFORM 1 FROM reconciliation_operation WHERE id = p_operation FOR NO KEY UPDATE;
    ELSE
        PERFORM 1 FROM reconciliation_operation WHERE id = p_operation FOR KEY SHARE;
    END IF;
    v_there := FOUND;
    IF p_due_now THEN
        -- A kept report is a reason to look again; where a person was called, automation stays out, unless that was
        -- only because nothing but such a report could tell. What was called not applied and may have been applied by a
        -- worker that woke up with its hand on the socket is never left unseen.
        UPDATE reconciliation_operation SET due_at = least(due_at, aftercall_now())
         WHERE id = p_operation AND (state = 'ambiguous'
                  AND (escalated_at IS NULL OR escalation_reason = 'nothing_can_find_out')
            OR state = 'failed_retryable' AND (p_entries->0->>'data')::jsonb->>'status' = 'applied'
            OR state IN ('failed_terminal', 'terminated')
               AND ledger_may_be_applied((p_entries->0->>'data')::jsonb));
        -- What the attempt cost is known from now on, whatever comes of the report; but a report may come twice, or after
        -- a settlement that had landed although its COMMIT errored.
        UPDATE reconciliation_operation o
           SET cost_minor = o.cost_minor + coalesce(((p_entries->0->>'data')::jsonb->>'cost')::bigint, 0)
         WHERE o.id = p_operation AND coalesce((p_entries->0->>'data')::jsonb->>'cost', '0') <> '0'
           AND NOT EXISTS (
            SELECT 1 FROM reconciliation_journalentry j
             WHERE j.operation_id = p_operation AND j.attempt = (p_entries->0->>'attempt')::int
               AND j.kind IN ('receipt', 'no_answer', 'not_applied', 'late_report')
               AND coalesce(j.data::jsonb->>'cost', '0') <> '0');
    END IF;
    v_now := aftercall_now();
    IF EXISTS (SELECT 1 FROM reconciliation_tombstone t WHERE t.kind = 'operation' AND t.subject_id = p_operation) THEN
        -- Heard of something whose row is gone: kept without it, and shown to a person.
        PERFORM ledger_journal(NULL, NULL, v_now, p_entries);
        INSERT INTO reconciliation_signal (kind, tenant, subject, since, seen_at, detail, told_open, told_cleared, tries, tell_at)
        SELECT 'heard_after_pruning', t.tenant, 'operation:' || p_operation, v_now, v_now,
               'A report about it came after its row was pruned.', false, false, 0, v_now
          FROM reconciliation_tombstone t WHERE t.kind = 'operation' AND t.subject_id = p_operation
            ON CONFLICT DO NOTHING;
        RETURN v_now;
    END IF;
    IF NOT v_there THEN
        RAISE EXCEPTION 'There is neither an operation % nor a run % to note this about.', p_operation, p_run
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    PERFORM ledger_journal(p_operation, p_run, v_now, p_entries);
    RETURN v_now;
END $$;

-- Approvals. Every function below is called with the run and the operation (or the run alone) locked, and every move of an
-- approval holds those locks, so that nothing changes between a check and what follows from it.

-- A request for consent is born. p_ask names its columns, and in seconds expires_after and use_within.
CREATE OR REPLACE FUNCTION ledger_ask(
    p_operation bigint, p_run bigint, p_tenant text, p_replaces bigint, p_ask jsonb, p_now timestamptz, p_body text,
    p_openings jsonb
) RETURNS bigint LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_new reconciliation_approval;
    v_blank CONSTANT jsonb := '{"action": "", "inputs": "{}", "policy": "", "reason": "", "seen_shown": "",
        "seen_sealed": "", "requested_by": "", "on_behalf_of": "", "forbidden": [], "decided_by": "",
        "decision_reason": ""}';
BEGIN
    v_new := jsonb_populate_record(NULL::reconciliation_approval, v_blank || p_ask);
    v_new.id := nextval(pg_get_serial_sequence('reconciliation_approval', 'id'));
    v_new.tenant := p_tenant;
    v_new.operation_id := p_operation;
    v_new.run_id := p_run;
    v_new.replaces_id := p_replaces;
    v_new.state := 'waiting';
    v_new.version := 1;
    v_new.created_at := p_now;
    v_new.updated_at := p_now;
    v_new.expires_at := p_now + (p_ask->>'expires_after')::numeric * interval '1 second';
    v_new.due_at := v_new.expires_at;
    INSERT INTO reconciliation_approval SELECT v_new.*;
    PERFORM audit_append('approval:' || v_new.id, p_tenant, 'transition', NULL, 'waiting', 1, p_body, p_openings);
    RETURN v_new.id;
END $$;

-- Approvals come to an end (or are used up) together with the move that ends them.
CREATE OR REPLACE FUNCTION ledger_end_approvals(
    p_ids bigint[], p_to text, p_now timestamptz, p_body text, p_openings jsonb
) RETURNS void LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_old reconciliation_approval;
BEGIN
    FOR v_old IN SELECT * FROM reconciliation_approval a WHERE a.id = ANY (p_ids) ORDER BY a.id FOR NO KEY UPDATE LOOP
        IF NOT EXISTS (SELECT 1 FROM reconciliation_move m WHERE m.kind = 'approval' AND m.source = v_old.state
                       AND m.target = p_to) THEN
            RAISE EXCEPTION 'approval %: % -> % is not in the table', v_old.id, v_old.state, p_to;
        END IF;
        UPDATE reconciliation_approval a SET state = p_to, version = a.version + 1, due_at = NULL, updated_at = p_now,
               settled_at = p_now WHERE a.id = v_old.id;
        PERFORM audit_append('approval:' || v_old.id, v_old.tenant, 'transition', v_old.state, p_to, v_old.version + 1,
                             p_body, p_openings);
    END LOOP;
END $$;

-- Why an approval of an operator action cannot be used now for exactly this; null where it can.
CREATE OR REPLACE FUNCTION ledger_unusable(p_use jsonb, p_operation bigint, p_run bigint, p_now timestamptz)
RETURNS text LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT CASE
        WHEN a.id IS NULL OR a.state IN ('waiting', 'denied', 'withdrawn', 'superseded') THEN 'not_approved'
        WHEN a.state = 'consumed' THEN 'approval_used'
        WHEN a.operation_id IS DISTINCT FROM p_operation OR a.run_id IS DISTINCT FROM p_run
          OR a.limit_id IS DISTINCT FROM (p_use->>'limit_id')::bigint
          OR a.job_id IS DISTINCT FROM (p_use->>'job_id')::bigint
          OR a.action IS DISTINCT FROM p_use->>'action' OR a.fingerprint IS DISTINCT FROM p_use->>'fingerprint'
            THEN 'approval_of_another'
        WHEN a.state = 'expired' OR a.use_by <= ledger_latest(p_now) THEN 'approval_past_use_by'
    END
    FROM (SELECT 1) AS one LEFT JOIN reconciliation_approval a ON a.id = (p_use->>'id')::bigint;
$$;

-- Why an operation that needs consent may not be claimed; null where it may. Another attempt of what was claimed under
-- a consent is still that one action, until the consent's use-by; an unknown one may already have been applied, so a
-- safe repeat adds nothing to what was agreed to. After a restore one may be unknown to which nobody is known to have
-- agreed; its request for consent was superseded, and is made anew.
CREATE OR REPLACE FUNCTION ledger_unconsented(p_id bigint, p_state text, p_fingerprint text, p_now timestamptz)
RETURNS text LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT CASE
        WHEN p_state = 'ambiguous' AND a.state = 'consumed' THEN NULL
        WHEN a.state IS NULL OR a.state NOT IN ('approved', 'consumed', 'expired', 'superseded')
          OR a.state = 'consumed' AND p_state <> 'failed_retryable' THEN 'not_approved'
        WHEN a.fingerprint <> p_fingerprint THEN 'approval_of_another'
        WHEN a.state IN ('expired', 'superseded') OR a.use_by <= ledger_latest(p_now) THEN 'approval_past_use_by'
    END
    FROM (SELECT 1) AS one LEFT JOIN LATERAL (SELECT * FROM reconciliation_approval n WHERE n.operation_id = p_id
        AND n.action = '' ORDER BY n.id DESC LIMIT 1) AS a ON true;
$$;

-- What a move of an operation means for its approvals.
CREATE OR REPLACE FUNCTION ledger_approvals_of(
    p_id bigint, p_tenant text, p_from text, p_to text, p_consent jsonb, p_now timestamptz, p_body text, p_openings jsonb
) RETURNS void LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_last reconciliation_approval;
BEGIN
    SELECT * INTO v_last FROM reconciliation_approval a WHERE a.operation_id = p_id AND a.action = ''
     ORDER BY a.id DESC LIMIT 1;
    IF p_to = 'pending' AND v_last.state = 'approved' THEN
        PERFORM ledger_end_approvals(ARRAY[v_last.id], 'consumed', p_now, p_body, p_openings);
    ELSIF p_to = 'awaiting_approval' THEN
        IF v_last.state = 'approved' OR p_from = 'pending' AND v_last.state = 'consumed' THEN
            PERFORM ledger_end_approvals(ARRAY[v_last.id],
                CASE WHEN p_from = 'pending' THEN 'superseded' ELSE 'expired' END, p_now, p_body, p_openings);
        END IF;
        IF p_consent->'ask' IS NOT NULL THEN
            PERFORM ledger_ask(p_id, NULL, p_tenant, v_last.id, p_consent->'ask', p_now, p_body, p_openings);
        END IF;
    ELSIF p_to IN ('succeeded', 'failed_terminal', 'terminated') AND v_last.state IN ('waiting', 'approved') THEN
        PERFORM ledger_end_approvals(ARRAY[v_last.id],
            CASE WHEN p_consent->'superseded' IS NULL THEN 'withdrawn' ELSE 'superseded' END, p_now, p_body, p_openings);
    END IF;
    IF p_from = 'ambiguous' THEN
        -- What a person asked a second person for was about an unknown outcome, which this move has changed.
        PERFORM ledger_end_approvals(ARRAY(SELECT a.id FROM reconciliation_approval a WHERE a.operation_id = p_id
            AND a.action <> '' AND a.state IN ('waiting', 'approved')), 'superseded', p_now, p_body, p_openings);
    END IF;
END $$;

-- A request for a second person's consent to an operator action, or (p_ask names "limit_id" or "job_id") to a change of
-- what guards them. p_version is the subject's, as the asker saw it.
CREATE OR REPLACE FUNCTION ledger_open_approval(
    p_operation bigint, p_run bigint, p_version int, p_ask jsonb, p_body text, p_openings jsonb
) RETURNS TABLE (verdict text, id bigint, at timestamptz, detail text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_operation reconciliation_operation;
    v_run reconciliation_run;
    v_limit reconciliation_limit;
    v_job reconciliation_job;
    v_open bigint;
    v_now timestamptz;
BEGIN
    SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = coalesce(p_run,
        (SELECT o.run_id FROM reconciliation_operation o WHERE o.id = p_operation)) FOR NO KEY UPDATE;
    SELECT * INTO v_operation FROM reconciliation_operation o WHERE o.id = p_operation FOR NO KEY UPDATE;
    SELECT * INTO v_limit FROM reconciliation_limit l WHERE l.id = (p_ask->>'limit_id')::bigint FOR NO KEY UPDATE;
    SELECT * INTO v_job FROM reconciliation_job j WHERE j.id = (p_ask->>'job_id')::bigint FOR NO KEY UPDATE;
    v_now := aftercall_now();
    IF coalesce(v_operation.version, v_run.version, v_limit.version, v_job.version) IS DISTINCT FROM p_version
       OR v_limit.lifted_at IS NOT NULL THEN
        RETURN QUERY SELECT 'stale_version'::text, coalesce(p_operation, p_run, v_limit.id, v_job.id), v_now,
                            coalesce(v_operation.state, v_run.state, '')::text;
        RETURN;
    END IF;
    SELECT a.id INTO v_open FROM reconciliation_approval a WHERE a.operation_id IS NOT DISTINCT FROM p_operation
       AND a.run_id IS NOT DISTINCT FROM p_run AND a.limit_id IS NOT DISTINCT FROM v_limit.id
       AND a.job_id IS NOT DISTINCT FROM v_job.id AND a.action = p_ask->>'action'
       AND (p_operation IS NOT NULL OR a.inputs = p_ask->>'inputs') AND a.state IN ('waiting', 'approved');
    IF v_open IS NOT NULL THEN
        RETURN QUERY SELECT 'exists'::text, v_open, v_now, ''::text;
        RETURN;
    END IF;
    RETURN QUERY SELECT 'moved'::text, ledger_ask(p_operation, p_run, coalesce(v_operation.tenant, v_run.tenant,
        v_job.tenant, nullif(v_limit.tenant, ''), ':all'), NULL, p_ask, v_now, p_body, p_openings), v_now, ''::text;
END $$;

-- A limit or a job was changed, in the caller's transaction and under its row's lock: uses up the consent that allowed
-- it (p_use, or NULL where none is needed) and ends the other requests, which were about what it was before. Gives why
-- the consent cannot be used, or NULL.
CREATE OR REPLACE FUNCTION ledger_policy_changed(p_limit bigint, p_job bigint, p_use jsonb, p_body text, p_openings jsonb)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_now timestamptz := aftercall_now();
    v_refused text;
BEGIN
    IF p_use IS NOT NULL THEN
        PERFORM 1 FROM reconciliation_approval a WHERE a.id = (p_use->>'id')::bigint FOR NO KEY UPDATE;
        v_refused := ledger_unusable(
            p_use || jsonb_build_object('limit_id', p_limit, 'job_id', p_job), NULL, NULL, v_now);
        IF v_refused IS NOT NULL THEN
            RETURN v_refused;
        END IF;
        PERFORM ledger_end_approvals(ARRAY[(p_use->>'id')::bigint], 'consumed', v_now, p_body, p_openings);
    END IF;
    PERFORM ledger_end_approvals(ARRAY(SELECT a.id FROM reconciliation_approval a
        WHERE (a.limit_id = p_limit OR a.job_id = p_job) AND a.state IN ('waiting', 'approved')), 'superseded', v_now,
        p_body, p_openings);
    RETURN NULL;
END $$;

-- Names as they are compared: people sign in without regard to the case of a name or an e-mail address.
CREATE OR REPLACE FUNCTION ledger_folded(p_names text[]) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg(lower(n)) FROM unnest(p_names) AS n;
$$;

-- A decision about an approval, or its end, and with it the move of the operation that waits for it.
-- The moment of expiry belongs to the time after: at expires_at itself nobody can approve any more. The row's state is
-- not asked for that, so that a sweep which does not run changes no answer. p_who: every name of who decides.
CREATE OR REPLACE FUNCTION ledger_move_approval(
    p_id bigint, p_version int, p_to text, p_who text[], p_patch jsonb, p_operation_to text, p_operation_patch jsonb,
    p_operation_after jsonb, p_body text, p_openings jsonb
) RETURNS TABLE (verdict text, id bigint, at timestamptz, detail text, version int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_old reconciliation_approval;
    v_operation reconciliation_operation;
    v_run_id bigint;
    v_now timestamptz;
    v_refused text;
    v_moved text;
BEGIN
    SELECT coalesce(a.run_id, o.run_id) INTO v_run_id FROM reconciliation_approval a
      LEFT JOIN reconciliation_operation o ON o.id = a.operation_id WHERE a.id = p_id;
    PERFORM 1 FROM reconciliation_run r WHERE r.id = v_run_id FOR NO KEY UPDATE;
    SELECT o.* INTO v_operation FROM reconciliation_operation o WHERE o.id = (
        SELECT a.operation_id FROM reconciliation_approval a WHERE a.id = p_id) FOR NO KEY UPDATE;
    SELECT * INTO v_old FROM reconciliation_approval a WHERE a.id = p_id FOR NO KEY UPDATE;
    v_now := aftercall_now();
    v_refused := CASE
        WHEN v_old.id IS NULL THEN 'gone'
        WHEN v_old.version <> p_version THEN 'stale_version'
        WHEN NOT EXISTS (SELECT 1 FROM reconciliation_move m WHERE m.kind = 'approval' AND m.source = v_old.state
                         AND m.target = p_to) THEN 'not_in_table'
        WHEN p_to = 'approved' AND v_old.expires_at <= ledger_latest(v_now) THEN 'approval_expired'
        WHEN p_to = 'approved' AND ledger_folded(v_old.forbidden) && ledger_folded(p_who) THEN 'own_request'
        WHEN p_to = 'approved' AND v_old.action = '' AND (v_operation.state <> 'awaiting_approval'
            OR v_operation.fingerprint <> v_old.fingerprint) THEN 'approval_of_another'
        WHEN p_to = 'expired' AND coalesce(v_old.use_by, v_old.expires_at) > ledger_latest(v_now) THEN 'not_due'
    END;
    IF v_refused IS NOT NULL THEN
        RETURN QUERY SELECT v_refused, p_id, v_now, coalesce(v_old.state, '')::text, v_old.version;
        RETURN;
    END IF;
    UPDATE reconciliation_approval a SET
        state = p_to, version = v_old.version + 1, updated_at = v_now,
        decided_by = coalesce(p_patch->>'decided_by', a.decided_by),
        decision_reason = coalesce(p_patch->>'decision_reason', a.decision_reason),
        decided_at = CASE WHEN p_to IN ('approved', 'denied') THEN v_now ELSE a.decided_at END,
        use_by = CASE WHEN p_to = 'approved' THEN v_now + a.use_within * interval '1 second' ELSE a.use_by END,
        -- An operator action is done at once by who agreed; where it could not be, the sweep does it.
        due_at = CASE WHEN p_to = 'approved' THEN v_now + interval '1 second'
            * least(a.use_within, CASE WHEN a.action <> '' THEN (p_patch->>'again')::numeric END) END,
        settled_at = CASE WHEN p_to = 'approved' THEN NULL ELSE v_now END
    WHERE a.id = p_id;
    PERFORM audit_append('approval:' || p_id, v_old.tenant, 'transition', v_old.state, p_to, v_old.version + 1, p_body,
                         p_openings);
    IF p_operation_to IS NOT NULL AND v_operation.state = 'awaiting_approval' THEN
        SELECT m.verdict INTO v_moved FROM ledger_move_operation(v_operation.id, v_operation.version, NULL,
            p_operation_to, p_operation_patch, p_operation_after, NULL, '{}', '[]', p_body, p_openings, NULL, NULL) AS m;
        IF v_moved <> 'moved' THEN
            RAISE EXCEPTION 'operation % did not move with its approval: %', v_operation.id, v_moved;
        END IF;
    END IF;
    RETURN QUERY SELECT 'moved'::text, p_id, v_now, v_old.state::text, v_old.version + 1;
END $$;

-- Whether two people accepted that an operation which only a person's word calls not applied may be done a second time.
-- Its new intent used that consent up when it was born, and is not asked again when it is claimed.
CREATE OR REPLACE FUNCTION ledger_risk_accepted(p_operation bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT 1 FROM reconciliation_approval a WHERE a.operation_id = p_operation
                   AND a.action = 'new_intent' AND a.state = 'consumed');
$$;

-- What an earlier row or tombstone of the same intent, or of another version of it, says to a new one; verdict NULL
-- where it stands in nobody's way. The caller holds the lineage's lock. p_accepted is the operation of which two people
-- accept, by a consent that this birth uses up, that it may be done twice.
CREATE OR REPLACE FUNCTION ledger_earlier(
    p_lineage bytea, p_version int, p_accepted bigint, OUT verdict text, OUT id bigint, OUT detail text
) LANGUAGE plpgsql STABLE SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_stone record;
    v_other record;
BEGIN
    FOR v_stone IN SELECT t.subject_id, t.intent_version FROM reconciliation_tombstone t
                    WHERE t.lineage = p_lineage AND t.intent_version >= p_version ORDER BY t.intent_version LIMIT 1
    LOOP
        -- It is known although its row is gone: answered from what is left of it.
        verdict := CASE WHEN v_stone.intent_version = p_version THEN 'pruned' ELSE 'newer_version_exists' END;
        id := v_stone.subject_id;
        RETURN;
    END LOOP;
    FOR v_other IN SELECT o.id, o.intent_version, o.state, o.version, o.unknown_attempts
                     FROM reconciliation_operation o WHERE o.lineage = p_lineage ORDER BY o.intent_version
    LOOP
        verdict := CASE
            WHEN v_other.intent_version = p_version THEN 'exists'
            WHEN v_other.intent_version > p_version THEN 'newer_version_exists'
            WHEN v_other.state = 'failed_terminal' AND v_other.unknown_attempts <> '{}'
              AND (v_other.id = p_accepted OR ledger_risk_accepted(v_other.id)) THEN NULL
            WHEN v_other.state IN ('pending', 'ambiguous')
              OR v_other.unknown_attempts <> '{}' AND v_other.state <> 'succeeded' THEN 'older_version_open'
            WHEN v_other.state IN ('ready', 'awaiting_approval', 'failed_retryable') THEN 'older_version_waiting'
        END;
        IF verdict IS NOT NULL THEN
            id := v_other.id;
            detail := CASE verdict WHEN 'exists' THEN '' WHEN 'older_version_waiting' THEN v_other.version::text
                           ELSE v_other.state END;
            RETURN;
        END IF;
    END LOOP;
END $$;

-- The birth of an operation. Returns no verdict row of an existing one: ON CONFLICT waits for the other transaction,
-- and the caller reads in a statement of its own, whose snapshot sees it.
-- p_row names every column that has a value; p_after holds seconds from now for the times that a birth may set.
-- This and the move below are the hot path: a step that can be an assignment is no statement, a check that almost always
-- passes is asked for together with others, and plans are made once (docs/benchmarks.md has the figures).
CREATE OR REPLACE FUNCTION ledger_open(
    p_row json, p_after jsonb, p_journal jsonb, p_body text, p_openings jsonb, p_run_generation int,
    p_ask jsonb DEFAULT NULL, p_horizon numeric DEFAULT NULL, p_mass_limit int DEFAULT NULL,
    p_held_by bigint DEFAULT NULL, p_held_code text DEFAULT NULL,
    OUT verdict text, OUT id bigint, OUT at timestamptz, OUT detail text
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_new reconciliation_operation := json_populate_record(NULL::reconciliation_operation, p_row);
    v_run reconciliation_run;
    v_now timestamptz;
    v_known boolean;
    v_allowed boolean;
    v_limits boolean;
    v_held record;
    v_use jsonb;
    v_accepted bigint;
    v_done text;
BEGIN
    detail := '';
    IF v_new.run_id IS NOT NULL OR v_new.undo_of_id IS NOT NULL THEN
        IF p_run_generation IS NULL THEN
            -- A person's: the run itself may be moved in the same transaction, and of two readers neither could be first.
            SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = v_new.run_id FOR NO KEY UPDATE;
        ELSE
            SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = v_new.run_id FOR SHARE;
        END IF;
        IF v_new.run_id IS NOT NULL AND v_new.state = 'pending'
           AND NOT ledger_run_lets(v_run, v_new.undo_of_id IS NOT NULL, p_run_generation, NULL) THEN
            verdict := 'run_not_held';
            id := v_new.run_id;
            at := aftercall_now();
            detail := coalesce(v_run.state, 'none');
            RETURN;
        END IF;
        -- What is not claimed at once, but waits or is asked for, comes too late for a run that has ended meanwhile.
        IF v_run.settled_at IS NOT NULL AND (v_new.undo_of_id IS NULL OR p_run_generation IS NOT NULL) THEN
            verdict := 'run_not_held';
            id := v_new.run_id;
            at := aftercall_now();
            detail := v_run.state;
            RETURN;
        END IF;
        verdict := CASE
            WHEN v_new.undo_of_id IS NULL THEN NULL
            WHEN ledger_waived(v_run, v_new.step) THEN 'waived'
            WHEN v_new.state = 'pending' AND p_run_generation IS NULL AND NOT ledger_lock_free(v_run) THEN 'lock_held'
        END;
        IF verdict IS NOT NULL THEN
            id := v_new.undo_of_id;
            at := aftercall_now();
            RETURN;
        END IF;
        PERFORM 1 FROM reconciliation_operation o WHERE o.id = v_new.undo_of_id FOR KEY SHARE;
        IF v_new.undo_of_id IS NOT NULL AND NOT FOUND OR v_new.run_id IS DISTINCT FROM v_run.id THEN
            RAISE EXCEPTION 'There is no run % or no operation % for a new operation to refer to.', v_new.run_id,
                v_new.undo_of_id USING ERRCODE = 'foreign_key_violation';
        END IF;
    END IF;
    -- Two versions of one intent serialise here, so that neither can slip past the other (rule 9).
    v_done := pg_advisory_xact_lock(('x' || encode(substring(v_new.lineage FROM 1 FOR 8), 'hex'))::bit(64)::bigint);
    SELECT EXISTS (SELECT 1 FROM reconciliation_operation o WHERE o.lineage = v_new.lineage)
           OR EXISTS (SELECT 1 FROM reconciliation_tombstone t WHERE t.lineage = v_new.lineage),
           EXISTS (SELECT 1 FROM reconciliation_move m
                    WHERE m.kind = 'operation' AND m.source = '' AND m.target = v_new.state),
           EXISTS (SELECT 1 FROM reconciliation_limit l WHERE l.lifted_at IS NULL)
      INTO v_known, v_allowed, v_limits;
    v_now := aftercall_now();
    at := v_now;
    IF v_known OR NOT v_allowed OR v_new.intended_at IS NOT NULL THEN
        v_use := (p_row->'use')::jsonb;
        v_accepted := (v_use->>'operation')::bigint;
        IF v_accepted IS NOT NULL THEN
            PERFORM 1 FROM reconciliation_operation o WHERE o.id = v_accepted FOR NO KEY UPDATE;
            v_now := aftercall_now();
            at := v_now;
            verdict := ledger_unusable(v_use, v_accepted, NULL, v_now);
            PERFORM 1 FROM reconciliation_operation o WHERE o.id = v_accepted AND o.lineage = v_new.lineage
                AND o.state = 'failed_terminal' AND NOT o.sighted;
            IF verdict IS NOT NULL OR NOT FOUND THEN
                verdict := coalesce(verdict, 'approval_of_another');
                id := v_accepted;
                RETURN;
            END IF;
        END IF;
        SELECT e.verdict, e.id, coalesce(e.detail, '') INTO verdict, id, detail
          FROM ledger_earlier(v_new.lineage, v_new.intent_version, v_accepted) AS e;
        verdict := coalesce(verdict, CASE
            WHEN NOT v_allowed THEN 'not_in_table'
            -- Nothing here knows it any more, and nothing could: whether it was done before cannot be told.
            WHEN v_new.intended_at < v_now - p_horizon * interval '1 second' THEN 'too_old'
        END);
        IF verdict IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    v_new.id := nextval('reconciliation_operation_id_seq');
    IF random() * p_mass_limit < 16 THEN
        PERFORM ledger_mass_guard(v_new, p_mass_limit);
        v_limits := true;  -- it may have set one just now
    END IF;
    IF v_new.state = 'pending' AND (v_new.ceiling_minor IS NOT NULL OR v_limits) THEN
        SELECT * INTO v_held FROM ledger_limited(v_new, 1);
        IF v_held.code IS NOT NULL THEN
            verdict := 'limited';
            id := v_held.limit_id;
            detail := concat_ws(' ', v_held.code, v_held.wait);
            RETURN;
        END IF;
    END IF;
    INSERT INTO reconciliation_operation (
        id, tenant, workflow_type, workflow_id, step, business_object, intent_version, lineage, key, run_id, execution,
        undo_of_id, retry_policy, ceiling_minor, spent_is_final, consent, provider, account, action, fingerprint,
        request_shown, request_sealed, amount_minor, currency, state, version, generation, claim_nonce, lease_owner,
        lease_until, due_at, attempts, unknown_attempts, absent_reads, absences, sighted, look_ups, identical_replays,
        first_sent_at, last_sent_at, same_key_until, error_class, reason_code, escalated_at, escalation_reason, basis,
        provider_operation_id, effect_id, result_shown, result_sealed, cost_minor, requested_by, on_behalf_of,
        owners, intended_at, created_at, updated_at)
    VALUES (
        v_new.id, v_new.tenant, v_new.workflow_type, v_new.workflow_id, v_new.step, v_new.business_object,
        v_new.intent_version, v_new.lineage, v_new.key, v_new.run_id, v_new.execution, v_new.undo_of_id,
        v_new.retry_policy, v_new.ceiling_minor, v_new.spent_is_final, v_new.consent, v_new.provider, v_new.account,
        v_new.action, v_new.fingerprint, v_new.request_shown, v_new.request_sealed, v_new.amount_minor, v_new.currency,
        v_new.state, 1, v_new.generation, v_new.claim_nonce, v_new.lease_owner,
        v_now + (p_after->>'lease_until')::float8 * interval '1 second',
        v_now + (p_after->>'due_at')::float8 * interval '1 second',
        v_new.attempts, '{}', 0, 0, false, 0, 0,
        v_now + (p_after->>'first_sent_at')::float8 * interval '1 second',
        v_now + (p_after->>'last_sent_at')::float8 * interval '1 second',
        v_now + (p_after->>'same_key_until')::float8 * interval '1 second', '', v_new.reason_code,
        v_now + (p_after->>'escalated_at')::float8 * interval '1 second', v_new.escalation_reason, '', '', '', '', '',
        0, v_new.requested_by, v_new.on_behalf_of, coalesce(v_new.owners, '{}'), v_new.intended_at, v_now, v_now);
    IF p_held_code IS NOT NULL THEN
        PERFORM ledger_note_held(v_new.id, p_held_by, p_held_code, v_now);
    END IF;
    v_done := ledger_journal(v_new.id, NULL, v_now, p_journal);
    v_done := audit_append('operation:' || v_new.id, v_new.tenant, 'transition', NULL, v_new.state, 1, p_body, p_openings);
    IF v_accepted IS NOT NULL THEN
        PERFORM ledger_end_approvals(ARRAY[(v_use->>'id')::bigint], 'consumed', v_now, p_body, p_openings);
    END IF;
    IF p_ask IS NOT NULL THEN
        PERFORM ledger_ask(v_new.id, NULL, v_new.tenant, NULL, p_ask, v_now, p_body, p_openings);
    END IF;
    IF v_new.undo_of_id IS NOT NULL AND v_new.state = 'pending' AND p_run_generation IS NULL AND v_run.lock <> '' THEN
        UPDATE reconciliation_run r SET lock_held = true WHERE r.id = v_run.id;  -- as in the move below
    END IF;
    verdict := 'moved';
    id := v_new.id;
END $$;

-- Any later move of an operation, or of its mark (p_to NULL keeps the state).
-- p_guard names what must hold under the lock, by the database's clock:
--   lease_over    the lease has run out            lease_live   it has not, and the generation is p_generation
--   same_key      the key is still remembered      due          not_before has passed
--   no_newer      no newer operation with this action on this business object was sent
--   unreported    no late report says that it was applied
--   before:<t>    its step's cap on time, which ends at t, has not been reached
--   below:<n>     nor that on spend, which is n
--   held          p_generation is the current one and the state is pending, whatever the lease's clock says
-- p_patch holds columns, and "cost": minor units that are added to what the other attempts have cost.
-- p_consent: "ask" is the request for consent that goes with a move to awaiting_approval, "use" names the approval of an
-- operator action that this move uses up. What needs a consent is claimed with one that holds now, or not at all.
CREATE OR REPLACE FUNCTION ledger_move_operation(
    p_id bigint, p_version int, p_generation int, p_to text, p_patch jsonb, p_after jsonb, p_once jsonb,
    p_guard text[], p_journal jsonb, p_body text, p_openings jsonb, p_run_generation int, p_consent jsonb,
    OUT verdict text, OUT id bigint, OUT at timestamptz, OUT detail text, OUT version int
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_old reconciliation_operation;
    v_new reconciliation_operation;
    v_run reconciliation_run;
    v_run_id bigint;
    v_now timestamptz;
    v_held record;
    v_done text;
BEGIN
    v_old := (SELECT o FROM reconciliation_operation o WHERE o.id = p_id AND o.run_id IS NULL FOR NO KEY UPDATE);
    IF v_old.id IS NULL THEN
        -- It has a run, which it keeps for good and which is locked first; or it is gone.
        SELECT o.run_id INTO v_run_id FROM reconciliation_operation o WHERE o.id = p_id;
        SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = v_run_id FOR NO KEY UPDATE;
        v_old := (SELECT o FROM reconciliation_operation o WHERE o.id = p_id FOR NO KEY UPDATE);
    END IF;
    v_now := aftercall_now();
    id := p_id;
    at := v_now;
    detail := coalesce(v_old.state, '');
    version := v_old.version;
    verdict := CASE
        WHEN v_old.id IS NULL THEN 'gone'
        WHEN p_version IS NOT NULL AND v_old.version <> p_version THEN 'stale_version'
        WHEN 'held' = ANY (p_guard) AND (v_old.state <> 'pending' OR v_old.generation <> p_generation)
            THEN 'stale_generation'
        WHEN 'lease_live' = ANY (p_guard) AND (v_old.state <> 'pending' OR v_old.generation <> p_generation
            OR v_old.lease_until <= v_now) THEN 'stale_generation'
        WHEN 'lease_over' = ANY (p_guard) AND v_old.lease_until > v_now THEN 'lease_live'
        WHEN 'same_key' = ANY (p_guard) AND (v_old.same_key_until IS NULL OR v_old.same_key_until <= ledger_latest(v_now))
            THEN 'key_forgotten'
    END;
    IF verdict IS NULL AND (p_to = 'pending' OR p_consent IS NOT NULL OR p_guard <> '{held}') THEN
        -- What an ordinary settlement need not be asked.
        IF verdict IS NULL AND 'no_newer' = ANY (p_guard) THEN
            verdict := ledger_newer_sent(v_old);
        END IF;
        verdict := coalesce(verdict, CASE
            WHEN 'due' = ANY (p_guard) AND v_old.not_before > v_now THEN 'not_due'
            WHEN p_to = 'pending' AND v_old.shredded_at IS NOT NULL THEN 'shredded'
            WHEN p_to = 'pending' AND v_old.undo_of_id IS NOT NULL AND ledger_waived(v_run, v_old.step) THEN 'waived'
        END);
        IF verdict IS NULL AND (p_to = 'pending' OR 'unreported' = ANY (p_guard)) AND ledger_applied_reported(p_id) THEN
            verdict := 'reported_applied';
        END IF;
        IF verdict IS NULL AND p_to = 'pending' AND v_run_id IS NOT NULL
           AND NOT ledger_run_lets(v_run, v_old.undo_of_id IS NOT NULL, p_run_generation, v_old.created_at) THEN
            verdict := 'run_not_held';
        END IF;
        IF verdict IS NULL AND p_to = 'awaiting_approval' AND v_run.settled_at IS NOT NULL
           AND NOT ledger_run_lets(v_run, v_old.undo_of_id IS NOT NULL, NULL, v_old.created_at) THEN
            verdict := 'run_not_held';  -- its run has ended: nobody is asked about what is not sent any more
        END IF;
        IF verdict IS NULL AND p_to = 'pending' AND v_old.undo_of_id IS NOT NULL AND p_run_generation IS NULL
           AND NOT ledger_lock_free(v_run) THEN
            verdict := 'lock_held';
        END IF;
        IF verdict IS NULL AND EXISTS (SELECT 1 FROM unnest(p_guard) AS g
                                       WHERE g LIKE 'before:%' AND substr(g, 8)::timestamptz <= v_now) THEN
            verdict := 'time_spent';
        END IF;
        IF verdict IS NULL AND EXISTS (SELECT 1 FROM unnest(p_guard) AS g
                                       WHERE g LIKE 'below:%' AND substr(g, 7)::numeric <= v_old.cost_minor) THEN
            verdict := 'spend_cap';
        END IF;
    END IF;
    IF verdict IS NULL AND p_to IS NOT NULL THEN
        PERFORM 1 FROM reconciliation_move m
          WHERE m.kind = 'operation' AND m.source = v_old.state AND m.target = p_to;
        IF NOT FOUND THEN
            verdict := 'not_in_table';
        ELSIF p_to = 'ambiguous' AND v_old.state <> 'pending' THEN
            -- Within one history what is known does not become unknown: only a restore does that, while it lasts.
            PERFORM 1 FROM reconciliation_limit l WHERE l.kind IN ('restored', 'replay') AND l.lifted_at IS NULL;
            IF NOT FOUND THEN
                verdict := 'not_in_table';
            END IF;
        END IF;
    END IF;
    IF verdict IS NULL AND (p_to = 'pending' OR p_consent IS NOT NULL) THEN
        IF verdict IS NULL AND p_consent->'use' IS NOT NULL THEN
            verdict := ledger_unusable(p_consent->'use', p_id, NULL, v_now);
        END IF;
        IF verdict IS NULL AND p_to = 'pending' AND v_old.consent <> '' THEN
            verdict := ledger_unconsented(p_id, v_old.state, v_old.fingerprint, v_now);
        END IF;
    END IF;
    IF verdict IS NOT NULL THEN
        RETURN;
    END IF;
    IF p_to = 'pending' AND (v_old.ceiling_minor IS NOT NULL
       OR EXISTS (SELECT 1 FROM reconciliation_limit l WHERE l.lifted_at IS NULL)) THEN
        SELECT * INTO v_held FROM ledger_held_back(v_old);
        IF v_held.code IS NOT NULL THEN
            verdict := 'limited';
            id := v_held.limit_id;
            detail := concat_ws(' ', v_held.code, v_held.wait);
            RETURN;
        END IF;
    END IF;
    -- First, because what is due below rests on what has been seen of it, this included.
    v_done := ledger_journal(p_id, NULL, v_now, p_journal);
    IF p_after IS NULL AND p_once IS NULL THEN
        v_new := jsonb_populate_record(v_old, p_patch);
    ELSE
        v_new := jsonb_populate_record(v_old, ledger_patch(to_jsonb(v_old), p_patch, p_after, p_once, v_now));
    END IF;
    v_new.state := coalesce(p_to, v_old.state);
    v_new.version := v_old.version + 1;
    v_new.updated_at := v_now;
    -- Added here and not by who judged: a late report may have told the cost of another attempt meanwhile.
    v_new.cost_minor := v_old.cost_minor + coalesce((p_patch->>'cost')::bigint, 0);
    IF v_new.state <> 'pending' THEN
        v_new.lease_until := NULL;
        v_new.claim_nonce := NULL;
    END IF;
    IF v_new.state IN ('succeeded', 'failed_terminal', 'terminated') THEN
        v_new.settled_at := coalesce(v_old.settled_at, v_now);
        -- A report that it was or may be applied may have come in just before: that is looked at all the same.
        v_new.due_at := NULL;
        IF v_new.state <> 'succeeded' THEN
            v_new.due_at := CASE WHEN ledger_doubted(p_id) THEN v_now END;
        END IF;
    ELSIF v_new.state <> 'pending' AND v_new.escalated_at IS NOT NULL THEN
        v_new.due_at := NULL;  -- automation has stopped with it
    END IF;
    IF v_old.unknown_attempts <> '{}' THEN
        v_new.escalate_at := least(v_old.escalate_at, v_new.escalate_at);  -- another silence buys no more time
    END IF;
    IF v_new.escalate_at IS DISTINCT FROM v_old.escalate_at AND v_new.same_key_until > v_now THEN
        -- A person is called before the provider forgets the key, not after it (rule 8). A key that is forgotten
        -- already, or was never remembered, sets no deadline.
        v_new.escalate_at := least(v_new.escalate_at, v_new.same_key_until
            - least(interval '30 minutes', (v_new.same_key_until - v_new.first_sent_at) / 10));
    END IF;
    UPDATE reconciliation_operation o SET
        state = v_new.state, version = v_new.version, generation = v_new.generation,
        claim_nonce = v_new.claim_nonce, lease_owner = v_new.lease_owner, lease_until = v_new.lease_until,
        lease_ended_at = v_new.lease_ended_at, due_at = v_new.due_at, not_before = v_new.not_before,
        attempts = v_new.attempts,
        unknown_attempts = v_new.unknown_attempts, absent_reads = v_new.absent_reads,
        absent_read_at = v_new.absent_read_at, absences = v_new.absences, sighted = v_new.sighted, look_ups = v_new.look_ups,
        identical_replays = v_new.identical_replays, first_sent_at = v_new.first_sent_at,
        last_sent_at = v_new.last_sent_at, same_key_until = v_new.same_key_until, escalate_at = v_new.escalate_at,
        error_class = v_new.error_class, reason_code = v_new.reason_code, escalated_at = v_new.escalated_at,
        escalation_reason = v_new.escalation_reason, basis = v_new.basis,
        provider_operation_id = v_new.provider_operation_id, effect_id = v_new.effect_id,
        result_shown = v_new.result_shown, result_sealed = v_new.result_sealed, cost_minor = v_new.cost_minor,
        updated_at = v_new.updated_at, settled_at = v_new.settled_at
    WHERE o.id = p_id;
    IF p_consent->'use' IS NOT NULL THEN
        PERFORM ledger_end_approvals(ARRAY[(p_consent->'use'->>'id')::bigint], 'consumed', v_now, p_body, p_openings);
    END IF;
    IF v_new.state <> v_old.state AND (v_old.consent <> '' OR v_old.state = 'ambiguous' OR p_consent IS NOT NULL) THEN
        PERFORM ledger_approvals_of(p_id, v_old.tenant, v_old.state, v_new.state, p_consent, v_now, p_body, p_openings);
    END IF;
    IF v_run_id IS NOT NULL AND v_new.state <> 'pending'
       AND (v_new.state <> v_old.state OR (v_new.escalated_at IS NULL) <> (v_old.escalated_at IS NULL))
       AND v_run.state IN ('pending', 'uncertain', 'awaiting_approval', 'compensating')
       AND (v_run.escalated_at IS NULL OR v_run.escalation_reason IN (
           'step_needs_person', 'undo_incomplete', 'run_time_spent', 'run_spend_cap'))
       AND v_run.lease_until IS NULL THEN
        -- The run waits for this: wake it in the same transaction, so that no wake-up can be lost. What stopped
        -- for a step goes on when that step moves; what spent all it may ends if that was the last one.
        UPDATE reconciliation_run r SET due_at = least(r.due_at, v_now) WHERE r.id = v_run_id;
    END IF;
    IF p_to = 'pending' AND v_old.undo_of_id IS NOT NULL AND p_run_generation IS NULL AND v_run.lock <> '' THEN
        -- Its run has ended and has what it works on to itself once more, until this undo is known.
        UPDATE reconciliation_run r SET lock_held = true WHERE r.id = v_run_id;
    END IF;
    IF v_run.lock_held AND v_run.settled_at IS NOT NULL AND NOT ledger_run_unknown(v_run_id) THEN
        -- An ended run keeps its lock while one of its operations is unknown, and no longer.
        UPDATE reconciliation_run r SET lock_held = false WHERE r.id = v_run_id;
    END IF;
    v_done := audit_append('operation:' || p_id, v_old.tenant, 'transition', v_old.state, v_new.state, v_new.version,
                           p_body, p_openings);
    verdict := 'moved';
    version := v_new.version;
END $$;

-- Whether something that a run did is in flight or unknown.
CREATE OR REPLACE FUNCTION ledger_run_unknown(p_run bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT 1 FROM reconciliation_operation o WHERE o.run_id = p_run AND (o.state IN ('pending', 'ambiguous')
        OR o.state = 'terminated' AND o.unknown_attempts <> '{}'));
$$;

-- The birth of a run. A known identity is told, and read by the caller in a statement of its own. One that nothing here
-- knows and that was asked for more than p_horizon seconds ago is too old, as an operation is.
CREATE OR REPLACE FUNCTION ledger_open_run(p_row jsonb, p_after jsonb, p_body text, p_openings jsonb, p_horizon numeric)
RETURNS TABLE (verdict text, id bigint, at timestamptz, detail text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_new reconciliation_run;
    v_now timestamptz := aftercall_now();
    v_lineage bytea;
    v_blank CONSTANT jsonb := '{"version": 1, "generation": 0, "lease_owner": "", "waiting_for": "",
        "escalation_reason": "", "reason_code": "", "lock": "", "lock_held": false, "waived": [], "replans": 0, "voided": [],
        "input_shown": "{}", "input_sealed": "", "requested_by": "", "owners": [], "workflow_digest": "",
        "on_behalf_of": ""}';
BEGIN
    IF NOT EXISTS (SELECT 1 FROM reconciliation_move m
                   WHERE m.kind = 'run' AND m.source = '' AND m.target = p_row->>'state') THEN
        RETURN QUERY SELECT 'not_in_table'::text, NULL::bigint, v_now, ''::text;
        RETURN;
    END IF;
    v_new := jsonb_populate_record(NULL::reconciliation_run, v_blank || p_row || ledger_patch(
        NULL, jsonb_build_object('created_at', v_now, 'updated_at', v_now), p_after, NULL, v_now));
    v_new.id := nextval(pg_get_serial_sequence('reconciliation_run', 'id'));
    -- A pruning of the same run commits before this look, or comes after this birth.
    v_lineage := ledger_run_lineage(v_new.tenant, v_new.workflow_type, v_new.workflow_id);
    PERFORM ledger_lock_lineage(v_lineage);
    IF EXISTS (SELECT 1 FROM reconciliation_tombstone t WHERE t.lineage = v_lineage) THEN
        RETURN QUERY SELECT 'pruned'::text, NULL::bigint, v_now, ''::text;
        RETURN;
    END IF;
    IF v_new.intended_at < v_now - p_horizon * interval '1 second' AND NOT EXISTS (
        SELECT 1 FROM reconciliation_run r WHERE r.tenant = v_new.tenant AND r.workflow_type = v_new.workflow_type
           AND r.workflow_id = v_new.workflow_id) THEN
        RETURN QUERY SELECT 'too_old'::text, NULL::bigint, v_now, ''::text;
        RETURN;
    END IF;
    INSERT INTO reconciliation_run SELECT v_new.* ON CONFLICT (tenant, workflow_type, workflow_id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'exists'::text, NULL::bigint, v_now, ''::text;
        RETURN;
    END IF;
    PERFORM audit_append('run:' || v_new.id, v_new.tenant, 'transition', NULL, v_new.state, v_new.version,
                         p_body, p_openings);
    RETURN QUERY SELECT 'moved'::text, v_new.id, v_now, ''::text;
END $$;

-- Whether an operation of the run moved since all of them were read: 'as_read:<n>' tells the sum of their versions then.
CREATE OR REPLACE FUNCTION ledger_moved_since_read(p_run bigint, p_guard text[]) RETURNS boolean
LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT 1 FROM unnest(p_guard) AS g WHERE g LIKE 'as_read:%' AND split_part(g, ':', 2)::bigint
        <> (SELECT coalesce(sum(o.version), 0) FROM reconciliation_operation o WHERE o.run_id = p_run));
$$;

-- Whether the step for which a run is about to wait does not stand any more as the run found it. Of a step's intents the
-- newest counts.
CREATE OR REPLACE FUNCTION ledger_step_moved(p_run reconciliation_run) RETURNS boolean
LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT coalesce((SELECT CASE
            WHEN o.state IN ('ambiguous', 'awaiting_approval') THEN false
            WHEN o.state = 'pending' THEN p_run.due_at IS NULL
            WHEN o.state IN ('ready', 'failed_retryable')
                THEN o.due_at IS NOT NULL AND (p_run.state <> 'pending' OR p_run.due_at IS NULL)
            ELSE true END
        FROM reconciliation_operation o WHERE o.run_id = p_run.id AND o.step = p_run.waiting_for
        ORDER BY o.intent_version DESC LIMIT 1), false);
$$;

-- Any later move of a run. Guards: nothing_unknown (no step in flight or unknown), held (p_generation is the current one),
-- not_held, as_read (a run that is left without a due time is looked at once more where a step moved since it was read).
CREATE OR REPLACE FUNCTION ledger_move_run(
    p_id bigint, p_version int, p_generation int, p_to text, p_patch jsonb, p_after jsonb,
    p_guard text[], p_journal jsonb, p_body text, p_openings jsonb, p_consent jsonb
) RETURNS TABLE (verdict text, id bigint, at timestamptz, detail text, version int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_old reconciliation_run;
    v_new reconciliation_run;
    v_now timestamptz;
    v_refused text;
BEGIN
    SELECT * INTO v_old FROM reconciliation_run r WHERE r.id = p_id FOR NO KEY UPDATE;
    v_now := aftercall_now();
    v_refused := CASE
        WHEN v_old.id IS NULL THEN 'gone'
        WHEN p_version IS NOT NULL AND v_old.version <> p_version THEN 'stale_version'
        WHEN 'held' = ANY (p_guard) AND (v_old.lease_until IS NULL OR v_old.generation <> p_generation)
            THEN 'stale_generation'
        WHEN 'not_held' = ANY (p_guard) AND v_old.lease_until > v_now THEN 'lease_live'
        WHEN p_to IS NOT NULL AND NOT EXISTS (SELECT 1 FROM reconciliation_move m WHERE m.kind = 'run'
            AND m.source = v_old.state AND m.target = p_to) THEN 'not_in_table'
        WHEN 'nothing_unknown' = ANY (p_guard) AND ledger_run_unknown(p_id) THEN 'step_unknown'
        WHEN p_to IN ('running', 'compensating') AND NOT ledger_lock_free(v_old) THEN 'lock_held'
        WHEN p_consent->'use' IS NOT NULL THEN ledger_unusable(p_consent->'use', NULL, p_id, v_now)
    END;
    IF v_refused IS NOT NULL THEN
        RETURN QUERY SELECT v_refused, p_id, v_now, coalesce(v_old.state, '')::text, v_old.version;
        RETURN;
    END IF;
    v_new := jsonb_populate_record(v_old, ledger_patch(NULL, p_patch, p_after, NULL, v_now));
    v_new.state := coalesce(p_to, v_old.state);
    v_new.version := v_old.version + 1;
    v_new.updated_at := v_now;
    IF v_new.state NOT IN ('running', 'compensating') THEN
        v_new.lease_until := NULL;
    END IF;
    IF v_new.state IN ('succeeded', 'failed', 'compensated', 'cancelled') THEN
        v_new.settled_at := coalesce(v_old.settled_at, v_now);
        v_new.due_at := NULL;
        v_new.lock_held := v_old.lock_held AND ledger_run_unknown(p_id);
    ELSE
        v_new.settled_at := NULL;  -- a person set an ended run going again
        v_new.lock_held := v_old.lock_held OR (v_new.lock <> '' AND v_new.state IN ('running', 'compensating'));
    END IF;
    IF v_new.settled_at IS NULL AND v_new.lease_until IS NULL AND v_new.escalated_at IS NOT NULL THEN
        -- Automation has stopped with it; unless a step moved between its reading and this, and woke nobody.
        v_new.due_at := CASE WHEN ledger_moved_since_read(p_id, p_guard) THEN v_now END;
    ELSIF v_new.settled_at IS NULL AND coalesce(v_new.due_at > v_now, true)
      AND (ledger_step_moved(v_new) OR v_new.due_at IS NULL AND ledger_moved_since_read(p_id, p_guard)) THEN
        -- What it is about to wait for has happened while it was still held, and woke nobody: it goes on at once.
        v_new.due_at := v_now;
    END IF;
    UPDATE reconciliation_run r SET
        state = v_new.state, version = v_new.version, generation = v_new.generation,
        lease_owner = v_new.lease_owner, lease_until = v_new.lease_until, due_at = v_new.due_at,
        waiting_for = v_new.waiting_for, lock_held = v_new.lock_held, waived = v_new.waived,
        replans = v_new.replans, voided = v_new.voided, escalated_at = v_new.escalated_at,
        escalation_reason = v_new.escalation_reason, reason_code = v_new.reason_code,
        updated_at = v_new.updated_at, settled_at = v_new.settled_at
    WHERE r.id = p_id;
    IF p_consent->'use' IS NOT NULL THEN
        PERFORM ledger_end_approvals(ARRAY[(p_consent->'use'->>'id')::bigint], 'consumed', v_now, p_body, p_openings);
    END IF;
    PERFORM ledger_journal(NULL, p_id, v_now, p_journal);
    PERFORM audit_append('run:' || p_id, v_old.tenant, 'transition', v_old.state, v_new.state, v_new.version,
                         p_body, p_openings);
    RETURN QUERY SELECT 'moved'::text, p_id, v_now, v_old.state::text, v_new.version;
END $$;

-- Whether a run goes forward under this very lease.
CREATE OR REPLACE FUNCTION ledger_walks(p_run reconciliation_run, p_generation int, p_now timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(p_run.state = 'running' AND p_run.generation = p_generation AND p_run.lease_until > p_now, false);
$$;

-- A proposal is asked for only when that is on record (p_row: step, version, most, observer), under a lease that leaves
-- time for it: a model that is too slow, or takes its worker down, is asked as often as it may propose and no more.
-- Returns which proposal of the version it is; 0: none is left; null: the run is not held.
CREATE OR REPLACE FUNCTION ledger_ask_for_proposal(p_run bigint, p_generation int, p_seconds numeric, p_row jsonb)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_run reconciliation_run;
    v_now timestamptz;
    v_asked int;
BEGIN
    SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = p_run FOR NO KEY UPDATE;
    v_now := aftercall_now();
    IF NOT ledger_walks(v_run, p_generation, v_now) THEN
        RETURN NULL;
    END IF;
    -- Refused ones are counted too: they may be from before it was on record that they were asked for.
    SELECT greatest(
        (SELECT max(j.attempt) FROM reconciliation_journalentry j WHERE j.run_id = p_run AND j.kind = 'proposal_asked'
            AND j.data::jsonb @> jsonb_build_object('step', p_row->'step', 'version', p_row->'version')),
        (SELECT count(*) FROM reconciliation_chosen c WHERE c.run_id = p_run AND c.step = p_row->>'step'
            AND c.version = (p_row->>'version')::int AND NOT c.valid)) INTO v_asked;
    IF v_asked >= (p_row->>'most')::int THEN
        RETURN 0;
    END IF;
    UPDATE reconciliation_run r
       SET lease_until = greatest(r.lease_until, v_now + p_seconds * interval '1 second'),
           due_at = greatest(r.due_at, v_now + p_seconds * interval '1 second')
     WHERE r.id = p_run;
    PERFORM ledger_journal(NULL, p_run, v_now, jsonb_build_array(jsonb_build_object(
        'kind', 'proposal_asked', 'attempt', v_asked + 1, 'generation', p_generation, 'observer', p_row->>'observer',
        'data', (p_row - 'observer')::text)));
    RETURN v_asked + 1;
END $$;

-- What a choice step proposed, while the run is held. A valid proposal counts once a version: the first one. What comes
-- when the run is held no more is kept, and counts as refused: another may have been asked for, or decided upon, since.
CREATE OR REPLACE FUNCTION ledger_choose(p_run bigint, p_generation int, p_row jsonb)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_run reconciliation_run;
    v_late boolean;
BEGIN
    SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = p_run FOR NO KEY UPDATE;
    v_late := NOT ledger_walks(v_run, p_generation, aftercall_now());
    INSERT INTO reconciliation_chosen (run_id, step, version, valid, problem, reason, value_shown, value_sealed, at)
    SELECT v_run.id, p_row->>'step', (p_row->>'version')::int, (p_row->>'valid')::boolean AND NOT v_late,
           concat_ws('; ', CASE WHEN v_late THEN 'came when the run was held no more' END, nullif(p_row->>'problem', '')),
           p_row->>'reason', p_row->>'value_shown', p_row->>'value_sealed', aftercall_now()
    WHERE v_run.id IS NOT NULL
    ON CONFLICT DO NOTHING;
    RETURN CASE WHEN v_late THEN 'run_not_held' WHEN FOUND THEN 'moved' ELSE 'exists' END;
END $$;

-- A lease is prolonged only while it lives and is held; it never outlives p_longest seconds from the last send.
CREATE OR REPLACE FUNCTION ledger_heartbeat(p_id bigint, p_generation int, p_seconds numeric, p_longest numeric)
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz;
BEGIN
    PERFORM 1 FROM reconciliation_operation o WHERE o.id = p_id FOR NO KEY UPDATE;
    UPDATE reconciliation_operation o
       SET lease_until = least(aftercall_now() + p_seconds * interval '1 second',
                               o.last_sent_at + p_longest * interval '1 second'),
           due_at = least(aftercall_now() + p_seconds * interval '1 second',
                          o.last_sent_at + p_longest * interval '1 second')
     WHERE o.id = p_id AND o.state = 'pending' AND o.generation = p_generation AND o.lease_until > aftercall_now()
    RETURNING o.lease_until INTO v_until;
    RETURN v_until;
END $$;

-- Steps that run side by side share one lease: a short one never takes from a long one what that was given.
CREATE OR REPLACE FUNCTION ledger_heartbeat_run(p_id bigint, p_generation int, p_seconds numeric)
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz;
BEGIN
    PERFORM 1 FROM reconciliation_run r WHERE r.id = p_id FOR NO KEY UPDATE;
    UPDATE reconciliation_run r
       SET lease_until = greatest(r.lease_until, aftercall_now() + p_seconds * interval '1 second'),
           due_at = greatest(r.due_at, aftercall_now() + p_seconds * interval '1 second')
     WHERE r.id = p_id AND r.generation = p_generation AND r.lease_until > aftercall_now()
    RETURNING r.lease_until INTO v_until;
    RETURN v_until;
END $$;

-- Hand out due work: each id goes to one caller, and comes back after p_again seconds if that caller is lost.
-- Moving due_at decides nothing: what may be done is decided by the move itself, under its own lock.
CREATE OR REPLACE FUNCTION ledger_take_due(p_kind text, p_limit int, p_again numeric)
RETURNS SETOF bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := aftercall_now();
BEGIN
    IF p_kind = 'operation' THEN
        RETURN QUERY UPDATE reconciliation_operation o SET due_at = v_now + p_again * interval '1 second'
         WHERE o.id IN (SELECT d.id FROM reconciliation_operation d WHERE d.due_at <= v_now
                        ORDER BY d.due_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) RETURNING o.id;
    ELSIF p_kind = 'approval' THEN
        -- What was agreed to and could not be done yet is tried again, and still ends at its use-by.
        RETURN QUERY UPDATE reconciliation_approval a SET due_at = least(v_now + p_again * interval '1 second',
                                                                   CASE WHEN a.use_by > v_now THEN a.use_by END)
         WHERE a.id IN (SELECT d.id FROM reconciliation_approval d WHERE d.due_at <= v_now
                        ORDER BY d.due_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) RETURNING a.id;
    ELSE
        RETURN QUERY UPDATE reconciliation_run r SET due_at = v_now + p_again * interval '1 second'
         WHERE r.id IN (SELECT d.id FROM reconciliation_run d WHERE d.due_at <= v_now
                        ORDER BY d.due_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) RETURNING r.id;
    END IF;
END $$;
