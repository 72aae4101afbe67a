-- The restore fence: the functions through which fence.py and restore.py write its one row. See docs/decisions/.
-- A fence that is down is a limit of kind `restored`, which every claim reads anyway (limits.sql).

-- The ledger gets its identity, at its first start. Gives the identity that it has.
CREATE OR REPLACE FUNCTION fence_first(p_database uuid)
RETURNS uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_database uuid;
BEGIN
    INSERT INTO reconciliation_restorefence (id, database, state, version, mark, signature, reason, found, marking,
        operations_to, operations_end, runs_to, runs_end, marked, released_by, released_by_name, release_reason)
    VALUES (1, p_database, 'up', 0, 0, '', '', '{}', false, 0, 0, 0, 0, 0, '', '', '')
    ON CONFLICT DO NOTHING;
    SELECT database INTO v_database FROM reconciliation_restorefence;
    RETURN v_database;
END $$;

-- A mark that is committed after everything that is visible now: who has it has all of that. NULL while the fence is down.
CREATE OR REPLACE FUNCTION fence_mark(p_database uuid)
RETURNS bigint LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE reconciliation_restorefence SET mark = mark + 1 WHERE state = 'up' AND database = p_database RETURNING mark;
$$;

-- Numbers that the lost time gave out are not given out again: a late report of it must not meet another operation.
CREATE OR REPLACE FUNCTION fence_jump(p_by bigint) RETURNS void
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_table text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['reconciliation_operation', 'reconciliation_run', 'reconciliation_approval'] LOOP
        PERFORM setval(pg_get_serial_sequence(v_table, 'id'), nextval(pg_get_serial_sequence(v_table, 'id')) + p_by);
    END LOOP;
END $$;

-- The fence comes down: from this commit on no claim is given. False where it is down already for the same reason.
CREATE OR REPLACE FUNCTION fence_down(p_row jsonb, p_jump bigint, p_body text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_old reconciliation_restorefence;
    v_limit bigint;
    v_now timestamptz;
BEGIN
    PERFORM fence_first(gen_random_uuid());
    SELECT * INTO v_old FROM reconciliation_restorefence FOR NO KEY UPDATE;
    IF v_old.state = 'down' AND v_old.signature = p_row->>'signature' THEN
        RETURN false;
    END IF;
    v_now := aftercall_now();
    PERFORM fence_jump(p_jump);
    UPDATE reconciliation_restorefence SET
        state = 'down', version = v_old.version + 1, signature = p_row->>'signature', reason = p_row->>'reason',
        found = p_row->>'found', since = v_now, marking = (p_row->>'marking')::boolean, marked = 0,
        known_until = coalesce((SELECT e.at FROM audit_entry e ORDER BY e.id DESC LIMIT 1), v_now),
        operations_to = 0, operations_end = coalesce((SELECT max(id) FROM reconciliation_operation), 0),
        runs_to = 0, runs_end = coalesce((SELECT max(id) FROM reconciliation_run), 0);
    INSERT INTO reconciliation_limit (kind, tenant, provider, action, workflow_type, currency, since, set_by,
        set_by_name, reason, version, lifted_by)
    VALUES ('restored', '', '', '', '', '', v_now, 'system:fence', 'the restore fence', p_row->>'reason', 1, '')
    ON CONFLICT DO NOTHING RETURNING id INTO v_limit;
    IF v_limit IS NOT NULL THEN
        PERFORM audit_append('limit:' || v_limit, ':all', 'limit', NULL, 'set', 1, p_body, NULL);
    END IF;
    PERFORM audit_append('fence:1', ':all', 'transition', v_old.state, 'down', v_old.version + 1, p_body, NULL);
    RETURN true;
END $$;

-- How far the marking has come. p_operations and p_runs are ids; p_marked operations became unknown on the way.
CREATE OR REPLACE FUNCTION fence_marked(p_version int, p_operations bigint, p_runs bigint, p_marked bigint)
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE reconciliation_restorefence SET operations_to = p_operations, runs_to = p_runs, marked = marked + p_marked
     WHERE state = 'down' AND version = p_version;
$$;

-- A person says what an unanchored ledger is: a restored one, whose operations become unknown.
CREATE OR REPLACE FUNCTION fence_begin(p_version int, p_body text, p_openings jsonb)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    UPDATE reconciliation_restorefence SET marking = true, version = version + 1
     WHERE state = 'down' AND NOT marking AND version = p_version;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM audit_append('fence:1', ':all', 'transition', 'down', 'down', p_version + 1, p_body, p_openings);
    RETURN true;
END $$;

-- The fence goes up: after a release (what is new may be a repetition for p_window seconds), or because the ledger is
-- adopted as it is (p_adopt: nothing of it was lost). The ledger gets a new identity, so that no other copy has it.
CREATE OR REPLACE FUNCTION fence_up(
    p_version int, p_database uuid, p_adopt boolean, p_window int, p_by text, p_name text, p_reason text, p_body text,
    p_openings jsonb
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_old reconciliation_restorefence;
    v_limit reconciliation_limit;
    v_now timestamptz;
BEGIN
    PERFORM fence_first(p_database);
    SELECT * INTO v_old FROM reconciliation_restorefence FOR NO KEY UPDATE;
    IF v_old.version <> p_version OR v_old.state = 'up' AND NOT p_adopt THEN
        RETURN 'stale_version';
    ELSIF v_old.state = 'down' AND (p_adopt AND v_old.marking OR NOT p_adopt AND (NOT v_old.marking
          OR v_old.operations_to < v_old.operations_end OR v_old.runs_to < v_old.runs_end)) THEN
        RETURN 'unmarked';
    END IF;
    v_now := aftercall_now();
    UPDATE reconciliation_restorefence SET
        database = p_database, state = 'up', version = v_old.version + 1, mark = v_old.mark + 1, signature = '',
        released_at = v_now, released_by = p_by, released_by_name = p_name, release_reason = p_reason;
    SELECT * INTO v_limit FROM reconciliation_limit l WHERE l.kind = 'restored' AND l.lifted_at IS NULL FOR NO KEY UPDATE;
    IF v_limit.id IS NOT NULL THEN
        PERFORM ledger_end_limit(v_limit, p_by, p_body, p_openings);
    END IF;
    IF NOT p_adopt AND p_window > 0 THEN
        PERFORM fence_watch_for_replays(p_window, p_by, p_name, p_reason, v_now, p_body, p_openings);
    END IF;
    PERFORM audit_append('fence:1', ':all', 'transition', v_old.state, 'up', v_old.version + 1, p_body, p_openings);
    RETURN 'moved';
END $$;

-- What may be a repetition is told from what is new by the moment of the newest release.
CREATE OR REPLACE FUNCTION fence_watch_for_replays(
    p_window int, p_by text, p_name text, p_reason text, p_now timestamptz, p_body text, p_openings jsonb
) RETURNS void LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_limit reconciliation_limit;
BEGIN
    SELECT * INTO v_limit FROM reconciliation_limit l WHERE l.kind = 'replay' AND l.lifted_at IS NULL FOR NO KEY UPDATE;
    IF v_limit.id IS NOT NULL THEN
        PERFORM ledger_end_limit(v_limit, p_by, p_body, p_openings);
    END IF;
    INSERT INTO reconciliation_limit (kind, tenant, provider, action, workflow_type, currency, window_seconds, since,
        set_by, set_by_name, reason, version, lifted_by)
    VALUES ('replay', '', '', '', '', '', p_window, p_now, p_by, p_name, p_reason, 1, '') RETURNING id INTO v_limit.id;
    PERFORM audit_append('limit:' || v_limit.id, ':all', 'limit', NULL, 'set', 1, p_body, p_openings);
END $$;

-- What the release found open and is open still: it may begin again whatever the lost time did, however long it waits.
CREATE OR REPLACE FUNCTION fence_open_since(p_since timestamptz, OUT runs bigint, OUT messages bigint, OUT waiting bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT (SELECT count(*) FROM reconciliation_run r WHERE r.settled_at IS NULL AND r.created_at <= p_since),
           (SELECT count(*) FROM reconciliation_message m
             WHERE m.state IN ('waiting', 'stuck') AND m.created_at <= p_since),
           (SELECT count(*) FROM reconciliation_operation o
             WHERE o.state IN ('ready', 'awaiting_approval') AND o.attempts = 0
               AND coalesce(o.intended_at, o.created_at) <= p_since);
$$;

-- The replay window has passed and nothing is open from before: what is new is new. Gives whether there was one to end.
CREATE OR REPLACE FUNCTION fence_end_replays(p_body text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_limit reconciliation_limit;
BEGIN
    SELECT * INTO v_limit FROM reconciliation_limit l WHERE l.kind = 'replay' AND l.lifted_at IS NULL
       AND ledger_passed(l.since) >= l.window_seconds * interval '1 second'
       AND (SELECT o.runs + o.messages + o.waiting FROM fence_open_since(l.since) AS o) = 0 FOR NO KEY UPDATE SKIP LOCKED;
    IF v_limit.id IS NULL THEN
        RETURN false;
    END IF;
    PERFORM ledger_end_limit(v_limit, 'system:fence', p_body, NULL);
    RETURN true;
END $$;

-- Why a claim is refused by the fence, or NULL: while it is down, all of them; in the replay window the first claim of
-- what is not shown to originate after the release, by its own intended_at or by that of its run. A moment that lies in
-- the future shows nothing. What is shown to originate before it never becomes new by waiting: a step of a run that the
-- backup held open, a message that was stuck in it.
CREATE OR REPLACE FUNCTION fence_refuses(p_limit reconciliation_limit, p_op reconciliation_operation)
RETURNS text LANGUAGE plpgsql STABLE SET search_path = public, pg_temp AS $$
DECLARE
    v_now timestamptz := aftercall_now();
    v_origin timestamptz := p_op.intended_at;
    v_before boolean := false;
BEGIN
    IF p_limit.kind = 'restored' THEN
        RETURN 'restored';
    ELSIF p_op.state <> 'pending' AND p_op.attempts > 0 OR p_op.state = 'pending' AND p_op.attempts > 1 THEN
        RETURN NULL;
    END IF;
    IF p_op.run_id IS NOT NULL THEN
        SELECT greatest(v_origin, r.intended_at), r.created_at <= p_limit.since INTO v_origin, v_before
          FROM reconciliation_run r WHERE r.id = p_op.run_id;
    END IF;
    IF v_origin > p_limit.since AND v_origin <= v_now + interval '1 minute' THEN
        RETURN NULL;
    ELSIF ledger_passed(p_limit.since) >= p_limit.window_seconds * interval '1 second'
          AND NOT v_before AND coalesce(v_origin >= p_limit.since, true) THEN
        RETURN NULL;
    END IF;
    RETURN 'maybe_replayed';
END $$;

-- What would hold a claim of this operation back whatever else is in flight, or NULL; for one that has ended, a claim of
-- a new one in its place, which is shown to be new. p_provider, p_action: of another call than its own.
CREATE OR REPLACE FUNCTION fence_in_the_way(p_id bigint, p_provider text, p_action text)
RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT w.code FROM reconciliation_operation o
      JOIN reconciliation_limit l ON ledger_covers(l, o.tenant, coalesce(p_provider, o.provider),
           coalesce(p_action, o.action), o.workflow_type, o.currency)
       AND (l.kind IN ('restored', 'stop') OR l.kind = 'replay' AND o.settled_at IS NULL)
     CROSS JOIN LATERAL (SELECT CASE l.kind WHEN 'stop' THEN 'stopped' ELSE fence_refuses(l, o) END AS code) AS w
     WHERE o.id = p_id AND w.code IS NOT NULL
     ORDER BY l.kind = 'stop', l.id LIMIT 1;
$$;
