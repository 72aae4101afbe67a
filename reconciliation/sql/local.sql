-- Local effects: what is done in this database commits in one transaction with its settlement, or not at all.
-- The transaction is marked when it begins, by a row that only the fence takes away. A COMMIT that finds the mark is
-- refused by the database, so that code which ends the transaction too early, however it does that, commits nothing.

CREATE OR REPLACE FUNCTION local_effect_is_settled() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM reconciliation_localeffect e WHERE e.id = NEW.id) THEN
        RAISE EXCEPTION 'the effect of operation % is committed with its settlement, never by itself', NEW.operation_id;
    END IF;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS local_effect_needs_settlement ON reconciliation_localeffect;
CREATE CONSTRAINT TRIGGER local_effect_needs_settlement AFTER INSERT ON reconciliation_localeffect
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION local_effect_is_settled();

-- Called first in the transaction of a local effect. The server ends the transaction by itself when the lease is over,
-- so that a worker which froze in it holds the business's rows no longer than that.
CREATE OR REPLACE FUNCTION ledger_begin_local(p_id bigint, p_generation int, p_milliseconds int)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    INSERT INTO reconciliation_localeffect (operation_id, generation) VALUES (p_id, p_generation);
    PERFORM set_config('statement_timeout', p_milliseconds::text, true);
    PERFORM set_config('idle_in_transaction_session_timeout', p_milliseconds::text, true);
    IF current_setting('transaction_timeout', true) IS NOT NULL THEN  -- PostgreSQL 17 and newer
        PERFORM set_config('transaction_timeout', p_milliseconds::text, true);
    END IF;
END $$;

-- Called last before the settlement, in the same transaction. '' where the effect may be committed; the locks that it
-- takes are held until then, so nothing of what it checked can change in between. A lease that is over fences here,
-- although nobody has ended it yet: whoever ends it says that nothing was applied.
CREATE OR REPLACE FUNCTION ledger_fence_local(p_id bigint, p_generation int, p_run_generation int)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_run reconciliation_run;
    v_operation reconciliation_operation;
    v_now timestamptz;
BEGIN
    DELETE FROM reconciliation_localeffect e WHERE e.operation_id = p_id AND e.generation = p_generation;
    IF NOT FOUND THEN
        RETURN 'transaction_left';
    END IF;
    SELECT * INTO v_run FROM reconciliation_run r WHERE r.id = (
        SELECT o.run_id FROM reconciliation_operation o WHERE o.id = p_id) FOR NO KEY UPDATE;
    SELECT * INTO v_operation FROM reconciliation_operation o WHERE o.id = p_id FOR NO KEY UPDATE;
    v_now := aftercall_now();
    RETURN CASE
        WHEN v_operation.id IS NULL THEN 'gone'
        WHEN v_operation.state <> 'pending' OR v_operation.generation <> p_generation
          OR v_operation.lease_until <= v_now THEN 'stale_generation'
        WHEN v_operation.run_id IS NOT NULL
         AND NOT ledger_run_lets(v_run, v_operation.undo_of_id IS NOT NULL, p_run_generation, v_operation.created_at)
            THEN 'run_not_held'
        WHEN v_operation.consent <> '' AND NOT EXISTS (SELECT 1 FROM reconciliation_approval a
            WHERE a.operation_id = p_id AND a.action = '' AND a.state = 'consumed'
              AND a.fingerprint = v_operation.fingerprint) THEN 'not_approved'
        ELSE ''
    END;
END $$;
