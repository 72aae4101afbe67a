-- Stop switches, limits and the guard against mass triggering. Claims read them under their own transaction.
-- Locks: a claim takes the limits that count in order of id, then its object's ceiling, after its operation's row.

-- Whether a limit or a stop switch is in force for such a call; an empty name stands for every one.
CREATE OR REPLACE FUNCTION ledger_covers(
    p_limit reconciliation_limit, p_tenant text, p_provider text, p_action text, p_workflow text, p_currency text
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT p_limit.lifted_at IS NULL AND p_limit.tenant IN ('', p_tenant) AND p_limit.provider IN ('', p_provider)
       AND p_limit.action IN ('', p_action) AND p_limit.workflow_type IN ('', p_workflow)
       AND upper(p_limit.currency) IN ('', p_currency);
$$;

-- What holds this claim back, or code NULL. Where nothing does, the windows that it counts in are told of it.
CREATE OR REPLACE FUNCTION ledger_limited(
    p_op reconciliation_operation, p_attempt int, OUT limit_id bigint, OUT code text, OUT wait numeric
) LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_limit reconciliation_limit;
    v_counting bigint[] := '{}';
    v_sum numeric;
    v_oldest timestamptz;
    v_now timestamptz;
    v_from timestamptz;
    v_forward timestamptz := (SELECT c.forward_at FROM reconciliation_clock c);
BEGIN
    FOR v_limit IN
        SELECT * FROM reconciliation_limit l
         WHERE ledger_covers(l, p_op.tenant, p_op.provider, p_op.action, p_op.workflow_type, p_op.currency)
         ORDER BY l.kind NOT IN ('restored', 'replay'), l.kind <> 'stop', l.id
    LOOP
        limit_id := v_limit.id;
        IF v_limit.kind IN ('restored', 'replay') THEN
            code := fence_refuses(v_limit, p_op);
            IF code IS NOT NULL THEN
                wait := 30;
                RETURN;
            END IF;
            CONTINUE;
        END IF;
        IF v_limit.kind = 'stop' THEN
            code := 'stopped';
            wait := 30;
            RETURN;
        END IF;
        -- Two claims under one limit take turns, so that neither is counted without the other.
        PERFORM pg_advisory_xact_lock(726012, v_limit.id::int);
        v_now := aftercall_now();
        IF v_limit.kind = 'concurrency' THEN
            SELECT count(*) INTO v_sum FROM reconciliation_operation o
             WHERE o.state = 'pending' AND o.id <> p_op.id AND v_limit.tenant IN ('', o.tenant)
               AND v_limit.provider IN ('', o.provider) AND v_limit.action IN ('', o.action)
               AND v_limit.workflow_type IN ('', o.workflow_type) AND upper(v_limit.currency) IN ('', o.currency);
            IF v_sum >= v_limit.most THEN
                code := 'limit_concurrency';
                wait := 2;
                RETURN;
            END IF;
            CONTINUE;
        END IF;
        -- A rate counts attempts; an amount counts an operation once, however often it is tried. One below 0 makes no
        -- room: it may be a mistake, and nobody knows that it takes back what was counted. Nor does a clock that was
        -- set forward: what was counted before that counts for one more window.
        v_from := v_now - v_limit.window_seconds * interval '1 second';
        v_from := CASE WHEN v_forward > v_from THEN '-infinity' ELSE v_from END;
        SELECT CASE v_limit.kind WHEN 'rate' THEN count(*) + 1
                    ELSE coalesce(sum(greatest(u.amount_minor, 0)) FILTER (WHERE u.operation_id <> p_op.id), 0)
                         + greatest(p_op.amount_minor, 0) END, min(greatest(u.at, v_forward))
          INTO v_sum, v_oldest FROM reconciliation_limituse u
         WHERE u.limit_id = v_limit.id AND u.at > v_from;
        IF v_sum > v_limit.most THEN
            code := 'limit_' || v_limit.kind;
            -- Room comes when the oldest leaves the window. What is larger than the whole window waits for a person.
            wait := coalesce(extract(epoch FROM v_oldest - v_now) + v_limit.window_seconds, v_limit.window_seconds);
            RETURN;
        END IF;
        v_counting := v_counting || v_limit.id;
    END LOOP;
    limit_id := NULL;
    IF p_op.ceiling_minor IS NOT NULL AND ledger_over_ceiling(p_op) THEN
        code := 'ceiling_passed';
        RETURN;
    END IF;
    INSERT INTO reconciliation_limituse (limit_id, operation_id, attempt, at, amount_minor)
    SELECT l.id, p_op.id, CASE l.kind WHEN 'rate' THEN p_attempt ELSE 0 END, aftercall_now(),
           coalesce(p_op.amount_minor, 0)
      FROM reconciliation_limit l WHERE l.id = ANY (v_counting)
        ON CONFLICT ON CONSTRAINT limit_use_once DO UPDATE SET at = excluded.at;
END $$;

-- Whether this claim would take its object above what it may come to. Unknown counts as applied, below 0 as nothing.
CREATE OR REPLACE FUNCTION ledger_over_ceiling(p_op reconciliation_operation)
RETURNS boolean LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_sum numeric;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(
        concat_ws(chr(31), p_op.tenant, p_op.provider, p_op.account, p_op.action, p_op.business_object), 726012));
    SELECT coalesce(sum(greatest(o.amount_minor, 0)), 0) INTO v_sum FROM reconciliation_operation o
     WHERE o.tenant = p_op.tenant AND o.business_object = p_op.business_object AND o.provider = p_op.provider
       AND o.account = p_op.account AND o.action = p_op.action AND o.currency = p_op.currency AND o.id <> p_op.id
       AND (o.state IN ('pending', 'ambiguous', 'succeeded') OR o.unknown_attempts <> '{}');
    RETURN v_sum + greatest(p_op.amount_minor, 0) > p_op.ceiling_minor;
END $$;

-- Remember that a claim was refused, once for each operation and limit; gives how often it was.
CREATE OR REPLACE FUNCTION ledger_note_held(p_operation bigint, p_limit bigint, p_code text, p_now timestamptz)
RETURNS int LANGUAGE sql SET search_path = public, pg_temp AS $$
    INSERT INTO reconciliation_heldback AS h (operation_id, limit_id, code, first_at, last_at, times)
    VALUES (p_operation, p_limit, p_code, p_now, p_now, 1)
    ON CONFLICT ON CONSTRAINT held_back_once DO UPDATE SET last_at = excluded.last_at, times = h.times + 1
    RETURNING h.times;
$$;

-- The same for an operation that exists: it waits, longer each time, and its journal says so the first time.
CREATE OR REPLACE FUNCTION ledger_held_back(
    p_op reconciliation_operation, OUT limit_id bigint, OUT code text, OUT wait numeric
) LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_times int;
    v_now timestamptz;
BEGIN
    SELECT * INTO limit_id, code, wait FROM ledger_limited(p_op, p_op.attempts + 1);
    IF code IS NULL THEN
        RETURN;
    END IF;
    v_now := aftercall_now();
    v_times := ledger_note_held(p_op.id, limit_id, code, v_now);
    IF v_times = 1 THEN
        PERFORM ledger_journal(p_op.id, NULL, v_now, jsonb_build_array(jsonb_build_object('kind', 'held_back',
            'data', jsonb_build_object('code', code, 'limit', limit_id)::text)));
    END IF;
    wait := ledger_longer(wait, v_times, code);
    -- Only what merely waits: an unknown one keeps the time of its next look-up.
    UPDATE reconciliation_operation o SET due_at = greatest(o.due_at, v_now + wait * interval '1 second')
     WHERE o.id = p_op.id AND o.state IN ('ready', 'failed_retryable') AND o.due_at IS NOT NULL AND wait IS NOT NULL;
END $$;

-- A stop may last for days and is woken from by its release; room for one more is asked for again soon.
CREATE OR REPLACE FUNCTION ledger_longer(p_wait numeric, p_times int, p_code text)
RETURNS numeric LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_wait IS NULL THEN NULL
                WHEN p_code IN ('stopped', 'restored') THEN p_wait * 2 ^ least(p_times - 1, 7)
                WHEN p_code = 'limit_concurrency' THEN p_wait * 2 ^ least(p_times - 1, 5)
                ELSE least(greatest(p_wait, 1), 3600) END;
$$;

-- More new operations of one kind than p_most a minute: the guard sets the stop switch itself. It is asked at some
-- births only, so that it overshoots by about a sixteenth, and a person's release starts the count anew.
CREATE OR REPLACE FUNCTION ledger_mass_guard(p_op reconciliation_operation, p_most int)
RETURNS void LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_since timestamptz := aftercall_now() - interval '1 minute';
    v_seen int := 1;
    v_row record;
    v_stop bigint;
BEGIN
    SELECT greatest(v_since, max(l.lifted_at)) INTO v_since FROM reconciliation_limit l
     WHERE l.kind = 'stop' AND l.set_by = 'system:guard' AND l.lifted_at IS NOT NULL AND l.tenant = p_op.tenant
       AND l.provider = p_op.provider AND l.action = p_op.action;
    FOR v_row IN SELECT o.provider, o.action, o.created_at FROM reconciliation_operation o
                  WHERE o.tenant = p_op.tenant ORDER BY o.id DESC
    LOOP
        EXIT WHEN v_row.created_at <= v_since OR v_seen > p_most;
        v_seen := v_seen + (v_row.provider = p_op.provider AND v_row.action = p_op.action)::int;
    END LOOP;
    IF v_seen <= p_most THEN
        RETURN;
    END IF;
    INSERT INTO reconciliation_limit (kind, tenant, provider, action, workflow_type, currency, since, set_by,
        set_by_name, reason, version, lifted_by)
    VALUES ('stop', p_op.tenant, p_op.provider, p_op.action, '', '', aftercall_now(), 'system:guard',
        'the guard against mass triggering', format('more than %s new operations of this kind in a minute', p_most),
        1, '')
    ON CONFLICT DO NOTHING RETURNING id INTO v_stop;
    IF v_stop IS NOT NULL THEN
        PERFORM audit_append('limit:' || v_stop, p_op.tenant, 'limit', NULL, 'set', 1, format(
            '{"actor":"system:guard","actor_kind":"system","batch":null,"commitments":{},"details":{"most":%s},'
            '"evidence":null,"on_behalf_of":null,"reason_code":"mass_trigger"}', p_most), NULL);
    END IF;
END $$;

-- A person sets a limit. NULL where one stands in the same place, with a window of the same length, whatever its number.
CREATE OR REPLACE FUNCTION ledger_set_limit(p_row jsonb, p_body text, p_openings jsonb)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_new reconciliation_limit;
    v_blank CONSTANT jsonb := '{"tenant": "", "provider": "", "action": "", "workflow_type": "", "currency": "",
        "set_by_name": "", "reason": "", "lifted_by": ""}';
BEGIN
    IF p_row->>'kind' IN ('restored', 'replay') THEN
        RAISE EXCEPTION 'a limit of kind % is set by the fence alone', p_row->>'kind';
    END IF;
    v_new := jsonb_populate_record(NULL::reconciliation_limit, v_blank || p_row);
    v_new.since := aftercall_now();
    v_new.version := 1;
    v_new.lifted_at := NULL;
    v_new.id := nextval(pg_get_serial_sequence('reconciliation_limit', 'id'));
    INSERT INTO reconciliation_limit SELECT v_new.* ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM audit_append('limit:' || v_new.id, coalesce(nullif(v_new.tenant, ''), ':all'), 'limit', NULL, 'set', 1,
                         p_body, p_openings);
    RETURN v_new.id;
END $$;

-- It ends, and what it held back is due at once. Rows that somebody has locked come back by themselves.
CREATE OR REPLACE FUNCTION ledger_end_limit(p_old reconciliation_limit, p_by text, p_body text, p_openings jsonb)
RETURNS void LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_now timestamptz := aftercall_now();
BEGIN
    UPDATE reconciliation_limit l SET lifted_at = v_now, lifted_by = p_by, version = l.version + 1
     WHERE l.id = p_old.id;
    PERFORM ledger_wake_held(p_old.id, v_now);
    PERFORM audit_append('limit:' || p_old.id, coalesce(nullif(p_old.tenant, ''), ':all'), 'limit', 'set', 'lifted',
                         p_old.version + 1, p_body, p_openings);
END $$;

-- What a limit held back is due.
CREATE OR REPLACE FUNCTION ledger_wake_held(p_limit bigint, p_now timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    UPDATE reconciliation_run r SET due_at = p_now WHERE r.id IN (
        SELECT w.id FROM reconciliation_run w WHERE w.due_at > p_now AND w.lease_until IS NULL AND w.id IN (
            SELECT o.run_id FROM reconciliation_operation o JOIN reconciliation_heldback h ON h.operation_id = o.id
             WHERE h.limit_id = p_limit AND o.state IN ('ready', 'failed_retryable'))
        FOR NO KEY UPDATE SKIP LOCKED);
    UPDATE reconciliation_operation o SET due_at = p_now WHERE o.id IN (
        SELECT w.id FROM reconciliation_operation w WHERE w.due_at > p_now AND w.state IN ('ready', 'failed_retryable')
           AND (w.not_before IS NULL OR w.not_before <= p_now)
           AND w.id IN (SELECT h.operation_id FROM reconciliation_heldback h WHERE h.limit_id = p_limit)
        FOR NO KEY UPDATE SKIP LOCKED);
END $$;

-- A person lifts a limit. The fence's own are not lifted here: they end with its release.
CREATE OR REPLACE FUNCTION ledger_lift_limit(p_id bigint, p_version int, p_by text, p_body text, p_openings jsonb)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_old reconciliation_limit;
BEGIN
    SELECT * INTO v_old FROM reconciliation_limit l WHERE l.id = p_id FOR NO KEY UPDATE;
    IF v_old.id IS NULL OR v_old.lifted_at IS NOT NULL OR v_old.version <> p_version
       OR v_old.kind IN ('restored', 'replay') THEN
        RETURN false;
    END IF;
    PERFORM ledger_end_limit(v_old, p_by, p_body, p_openings);
    RETURN true;
END $$;

-- A person changes how much a limit lets through; where that is more, what it held back is due at once.
CREATE OR REPLACE FUNCTION ledger_change_limit(p_id bigint, p_version int, p_most bigint, p_body text, p_openings jsonb)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_old reconciliation_limit;
BEGIN
    SELECT * INTO v_old FROM reconciliation_limit l WHERE l.id = p_id FOR NO KEY UPDATE;
    IF v_old.id IS NULL OR v_old.lifted_at IS NOT NULL OR v_old.version <> p_version
       OR v_old.kind NOT IN ('concurrency', 'rate', 'amount') THEN
        RETURN false;
    END IF;
    UPDATE reconciliation_limit l SET most = p_most, version = l.version + 1 WHERE l.id = p_id;
    IF p_most > v_old.most THEN
        PERFORM ledger_wake_held(p_id, aftercall_now());
    END IF;
    PERFORM audit_append('limit:' || p_id, coalesce(nullif(v_old.tenant, ''), ':all'), 'limit', 'set', 'set',
                         p_version + 1, p_body, p_openings);
    RETURN true;
END $$;
