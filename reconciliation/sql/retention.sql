-- Pruning and shredding: the only ways in which a row of the ledger or its journal goes. Each call is one small
-- transaction about one subject; a row that somebody else has locked is left for the next time, so that two prunings
-- at once are harmless. Locks: run, lineage, operation, audit subject.

CREATE OR REPLACE FUNCTION ledger_lock_lineage(p_lineage bytea)
RETURNS void LANGUAGE sql SET search_path = public, pg_temp AS $$
    SELECT pg_advisory_xact_lock(('x' || encode(substring(p_lineage FROM 1 FOR 8), 'hex'))::bit(64)::bigint);
$$;

-- What a run is known by after its row is gone.
CREATE OR REPLACE FUNCTION ledger_run_lineage(p_tenant text, p_type text, p_workflow text)
RETURNS bytea LANGUAGE sql IMMUTABLE SET search_path = public, pg_temp AS $$
    SELECT sha256(convert_to(jsonb_build_array('run', p_tenant, p_type, p_workflow)::text, 'UTF8'));
$$;

CREATE OR REPLACE FUNCTION ledger_bury(p_stone reconciliation_tombstone)
RETURNS void LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    p_stone.id := nextval(pg_get_serial_sequence('reconciliation_tombstone', 'id'));
    p_stone.pruned_at := aftercall_now();
    INSERT INTO reconciliation_tombstone SELECT p_stone.*;
END $$;

-- Whether the ledger may have been restored. What is about to go may be what the lost time is told from; this is asked
-- at each subject, for the fence may come down in the middle of a round.
CREATE OR REPLACE FUNCTION ledger_restored()
RETURNS boolean LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT 1 FROM reconciliation_limit l WHERE l.kind = 'restored' AND l.lifted_at IS NULL);
$$;

-- Why an operation must stay, or ''. p_keep: seconds since it was settled.
CREATE OR REPLACE FUNCTION ledger_kept_because(p_op reconciliation_operation, p_keep numeric)
RETURNS text LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT CASE
        WHEN ledger_restored() THEN 'restored'
        WHEN p_op.state NOT IN ('succeeded', 'failed_terminal', 'terminated') THEN 'open'
        WHEN p_op.escalated_at IS NOT NULL THEN 'escalated'
        WHEN p_op.unknown_attempts <> '{}' AND p_op.state <> 'succeeded' THEN 'unknown'
        WHEN p_op.due_at IS NOT NULL THEN 'due'
        WHEN ledger_passed(p_op.settled_at) < greatest(p_keep, 86400) * interval '1 second' THEN 'young'
        WHEN p_op.same_key_until > aftercall_now() THEN 'key_remembered'
        WHEN EXISTS (SELECT 1 FROM reconciliation_operation u WHERE u.undo_of_id = p_op.id) THEN 'undo'
        WHEN EXISTS (SELECT 1 FROM reconciliation_run r WHERE r.id = p_op.run_id
                     AND (r.settled_at IS NULL OR r.escalated_at IS NOT NULL OR r.lock_held)) THEN 'run'
        WHEN EXISTS (SELECT 1 FROM reconciliation_approval a WHERE a.operation_id = p_op.id
                     AND a.state IN ('waiting', 'approved')) THEN 'approval'
        -- Guards that count rows would not see it any more: ledger_over_ceiling() sums up what was applied, for good, and
        -- ledger_newer_sent() keeps an older one that is still open from undoing what a newer one did.
        WHEN p_op.ceiling_minor IS NOT NULL AND p_op.state = 'succeeded' THEN 'ceiling'
        WHEN p_op.first_sent_at IS NOT NULL AND EXISTS (SELECT 1 FROM reconciliation_operation e
                     WHERE e.tenant = p_op.tenant AND e.business_object = p_op.business_object AND e.id < p_op.id
                       AND e.provider = p_op.provider AND e.account = p_op.account AND e.action = p_op.action
                       AND e.state NOT IN ('succeeded', 'failed_terminal', 'terminated')) THEN 'older_open'
        ELSE '' END;
$$;

CREATE OR REPLACE FUNCTION ledger_prune_operation(p_id bigint, p_keep numeric, p_body text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_op reconciliation_operation;
    v_stone reconciliation_tombstone;
    v_run_id bigint;
    v_lineage bytea;
    v_why text;
BEGIN
    SELECT o.run_id, o.lineage INTO v_run_id, v_lineage FROM reconciliation_operation o WHERE o.id = p_id;
    IF v_run_id IS NOT NULL THEN
        PERFORM 1 FROM reconciliation_run r WHERE r.id = v_run_id FOR SHARE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN 'busy';
        END IF;
    END IF;
    -- A claim of this identity sees the row or the tombstone, never neither (see ledger_open).
    PERFORM ledger_lock_lineage(v_lineage);
    SELECT * INTO v_op FROM reconciliation_operation o WHERE o.id = p_id FOR UPDATE SKIP LOCKED;
    IF v_op.id IS NULL THEN
        RETURN 'busy';
    END IF;
    v_why := ledger_kept_because(v_op, p_keep);
    IF v_why <> '' THEN
        RETURN v_why;
    END IF;
    v_stone.kind := 'operation';
    v_stone.subject_id := p_id;
    v_stone.tenant := v_op.tenant;
    v_stone.lineage := v_op.lineage;
    v_stone.intent_version := v_op.intent_version;
    v_stone.key_hash := sha256(convert_to(v_op.key, 'UTF8'));
    v_stone.fingerprint := v_op.fingerprint;
    v_stone.state := v_op.state;
    v_stone.basis := v_op.basis;
    v_stone.reason_code := v_op.reason_code;
    v_stone.version := v_op.version + 1;
    v_stone.settled_at := v_op.settled_at;
    PERFORM ledger_bury(v_stone);
    -- The journal's trigger lets go of the rows of this one subject, in this transaction, and of no other.
    PERFORM set_config('aftercall.pruning', 'operation:' || p_id, true);
    DELETE FROM reconciliation_journalentry j WHERE j.operation_id = p_id;
    PERFORM set_config('aftercall.pruning', '', true);
    -- What a window of a limit counts stays for as long as the window is: see ledger_forget_uses().
    DELETE FROM reconciliation_heldback h WHERE h.operation_id = p_id;
    PERFORM audit_append('approval:' || a.id, a.tenant, 'pruned', a.state, 'pruned', a.version + 1, p_body, NULL)
       FROM reconciliation_approval a WHERE a.operation_id = p_id ORDER BY a.id;
    DELETE FROM reconciliation_approval a WHERE a.operation_id = p_id;
    DELETE FROM reconciliation_operation o WHERE o.id = p_id;
    PERFORM audit_append('operation:' || p_id, v_op.tenant, 'pruned', v_op.state, 'pruned', v_op.version + 1, p_body, NULL);
    RETURN 'pruned';
END $$;

-- A run goes after all of its operations.
CREATE OR REPLACE FUNCTION ledger_prune_run(p_id bigint, p_keep numeric, p_body text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_run reconciliation_run;
    v_stone reconciliation_tombstone;
BEGIN
    SELECT ledger_run_lineage(r.tenant, r.workflow_type, r.workflow_id) INTO v_stone.lineage
      FROM reconciliation_run r WHERE r.id = p_id;
    PERFORM ledger_lock_lineage(v_stone.lineage);
    SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = p_id FOR UPDATE SKIP LOCKED;
    IF v_run.id IS NULL THEN
        RETURN 'busy';
    ELSIF ledger_restored() THEN
        RETURN 'restored';
    ELSIF v_run.settled_at IS NULL THEN
        RETURN 'open';
    ELSIF v_run.escalated_at IS NOT NULL THEN
        RETURN 'escalated';
    ELSIF ledger_passed(v_run.settled_at) < greatest(p_keep, 86400) * interval '1 second' THEN
        RETURN 'young';
    ELSIF EXISTS (SELECT 1 FROM reconciliation_approval a WHERE a.run_id = p_id AND a.state IN ('waiting', 'approved'))
    THEN
        RETURN 'approval';
    ELSIF EXISTS (SELECT 1 FROM reconciliation_operation o WHERE o.run_id = p_id) THEN
        RETURN 'operations';
    -- A schedule still counts it among those that go on. What is over keeps its record, with the run's id in it.
    ELSIF EXISTS (SELECT 1 FROM reconciliation_slot s WHERE s.run_id = p_id AND s.open) THEN
        RETURN 'schedule';
    END IF;
    v_stone.kind := 'run';
    v_stone.subject_id := p_id;
    v_stone.tenant := v_run.tenant;
    v_stone.intent_version := 0;
    v_stone.fingerprint := v_run.input_fingerprint;
    v_stone.state := v_run.state;
    v_stone.basis := '';
    v_stone.reason_code := v_run.reason_code;
    v_stone.version := v_run.version + 1;
    v_stone.settled_at := v_run.settled_at;
    PERFORM ledger_bury(v_stone);
    PERFORM set_config('aftercall.pruning', 'run:' || p_id, true);
    DELETE FROM reconciliation_journalentry j WHERE j.run_id = p_id;
    DELETE FROM reconciliation_chosen c WHERE c.run_id = p_id;
    PERFORM set_config('aftercall.pruning', '', true);
    PERFORM audit_append('approval:' || a.id, a.tenant, 'pruned', a.state, 'pruned', a.version + 1, p_body, NULL)
       FROM reconciliation_approval a WHERE a.run_id = p_id ORDER BY a.id;
    DELETE FROM reconciliation_approval a WHERE a.run_id = p_id;
    DELETE FROM reconciliation_run r WHERE r.id = p_id;
    PERFORM audit_append('run:' || p_id, v_run.tenant, 'pruned', v_run.state, 'pruned', v_run.version + 1, p_body, NULL);
    RETURN 'pruned';
END $$;

-- Empties what is sealed of a settled operation, of its journal, and of what was shown to whoever agreed to it; what may
-- be seen stays.
CREATE OR REPLACE FUNCTION ledger_shred(p_id bigint, p_after numeric, p_body text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_op reconciliation_operation;
BEGIN
    SELECT * INTO v_op FROM reconciliation_operation o WHERE o.id = p_id FOR NO KEY UPDATE SKIP LOCKED;
    IF v_op.id IS NULL THEN
        RETURN 'busy';
    ELSIF ledger_restored() THEN
        RETURN 'restored';
    ELSIF v_op.state NOT IN ('succeeded', 'failed_terminal', 'terminated') THEN
        RETURN 'open';
    ELSIF v_op.escalated_at IS NOT NULL THEN
        RETURN 'escalated';
    ELSIF v_op.unknown_attempts <> '{}' AND v_op.state <> 'succeeded' THEN
        RETURN 'unknown';
    ELSIF v_op.due_at IS NOT NULL THEN
        RETURN 'due';  -- a late report of it is looked into, by its request
    ELSIF v_op.settled_at > aftercall_now() - p_after * interval '1 second' THEN
        RETURN 'young';
    ELSIF EXISTS (SELECT 1 FROM reconciliation_run r WHERE r.id = v_op.run_id AND r.settled_at IS NULL) THEN
        RETURN 'run';  -- later steps, and undos, are built from its result
    ELSIF v_op.shredded_at IS NOT NULL THEN
        RETURN 'shredded';
    END IF;
    PERFORM set_config('aftercall.pruning', 'operation:' || p_id, true);
    UPDATE reconciliation_journalentry j SET sealed = '' WHERE j.operation_id = p_id AND j.sealed <> '';
    PERFORM set_config('aftercall.pruning', '', true);
    UPDATE reconciliation_approval a SET seen_sealed = ''
     WHERE a.operation_id = p_id AND a.settled_at IS NOT NULL AND a.seen_sealed <> '';
    UPDATE reconciliation_operation o SET request_sealed = '', result_sealed = '', shredded_at = aftercall_now(),
        version = o.version + 1, updated_at = aftercall_now() WHERE o.id = p_id;
    PERFORM audit_append('operation:' || p_id, v_op.tenant, 'shredded', v_op.state, v_op.state, v_op.version + 1, p_body, NULL);
    RETURN 'shredded';
END $$;

-- Empties what is sealed of the proposals that the decisions of an ended run refused. Nothing is built from them.
CREATE OR REPLACE FUNCTION ledger_shred_proposals(p_id bigint, p_after numeric, p_body text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_run reconciliation_run;
    v_found boolean;
BEGIN
    SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = p_id FOR NO KEY UPDATE SKIP LOCKED;
    IF v_run.id IS NULL THEN
        RETURN 'busy';
    ELSIF ledger_restored() THEN
        RETURN 'restored';
    ELSIF v_run.settled_at IS NULL THEN
        RETURN 'open';
    ELSIF v_run.escalated_at IS NOT NULL THEN
        RETURN 'escalated';
    ELSIF v_run.settled_at > aftercall_now() - p_after * interval '1 second' THEN
        RETURN 'young';
    END IF;
    PERFORM set_config('aftercall.pruning', 'run:' || p_id, true);
    UPDATE reconciliation_chosen c SET value_sealed = '' WHERE c.run_id = p_id AND NOT c.valid AND c.value_sealed <> '';
    v_found := FOUND;
    PERFORM set_config('aftercall.pruning', '', true);
    IF v_found THEN
        UPDATE reconciliation_run r SET version = r.version + 1, updated_at = aftercall_now() WHERE r.id = p_id;
        PERFORM audit_append('run:' || p_id, v_run.tenant, 'shredded', v_run.state, v_run.state, v_run.version + 1,
                             p_body, NULL);
    END IF;
    RETURN 'shredded';
END $$;

-- Messages of the outbox go some time after they are over; one whose operation is still open orders those behind it. No
-- operation remembers what a person discarded, so its message does, for as long as tombstones stay.
CREATE OR REPLACE FUNCTION ledger_forget_messages(p_older numeric, p_discarded numeric, p_limit int)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_count int;
BEGIN
    DELETE FROM reconciliation_message m WHERE m.id IN (
        SELECT d.id FROM reconciliation_message d WHERE d.state IN ('published', 'discarded')
           AND d.changed_at < aftercall_now() - greatest(p_older, 3600) * interval '1 second'
           AND (d.state = 'published' OR d.changed_at < aftercall_now() - p_discarded * interval '1 second')
           AND NOT EXISTS (SELECT 1 FROM reconciliation_operation o WHERE o.id = d.operation_id
                           AND o.state NOT IN ('succeeded', 'failed_terminal', 'terminated'))
         ORDER BY d.changed_at LIMIT p_limit FOR UPDATE OF d SKIP LOCKED);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Tombstones go when no source could bring their intent back any more.
CREATE OR REPLACE FUNCTION ledger_forget_tombstones(p_older numeric, p_limit int)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_count int;
BEGIN
    DELETE FROM reconciliation_tombstone t WHERE t.id IN (
        SELECT d.id FROM reconciliation_tombstone d
         WHERE d.pruned_at < aftercall_now() - greatest(p_older, 86400 * 30) * interval '1 second'
           AND ledger_passed(d.pruned_at) > greatest(p_older, 86400 * 30) * interval '1 second'
         ORDER BY d.pruned_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Uses that no window counts any more.
CREATE OR REPLACE FUNCTION ledger_forget_uses(p_limit int)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_count int;
BEGIN
    DELETE FROM reconciliation_limituse u WHERE u.id IN (
        SELECT d.id FROM reconciliation_limituse d JOIN reconciliation_limit l ON l.id = d.limit_id
         WHERE d.at < aftercall_now() - l.window_seconds * interval '1 second'
           AND ledger_passed(d.at) >= l.window_seconds * interval '1 second' OR l.lifted_at IS NOT NULL
         LIMIT p_limit FOR UPDATE OF d SKIP LOCKED);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;
