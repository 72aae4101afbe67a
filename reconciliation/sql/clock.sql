-- What follows when the database's clock is set. See timekeeping.py, whose rows and rules these are.

-- The latest time that this database has told. What was over then is over, whatever its clock says now.
CREATE OR REPLACE FUNCTION ledger_latest(p_now timestamptz)
RETURNS timestamptz LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT greatest(p_now, (SELECT c.told FROM reconciliation_clock c));
$$;

-- How much time has surely passed since p_from. What a clock that was set forward only tells of does not count: not up to
-- the setting that a beat has noticed, nor beyond what the beats have told, for they may be about to notice it.
CREATE OR REPLACE FUNCTION ledger_passed(p_from timestamptz)
RETURNS interval LANGUAGE sql STABLE SET search_path = public, pg_temp AS $$
    SELECT least(c.told, aftercall_now()) - greatest(p_from, c.forward_at)
      FROM (SELECT 1) AS one LEFT JOIN reconciliation_clock c ON true;
$$;

-- Look at the clock. p_known is what the caller was told at its last look, p_elapsed the seconds since then that it has
-- measured; both NULL at its first. Gives the time, and by how much the clock was set back (below 0) or forward, once.
CREATE OR REPLACE FUNCTION ledger_keep_time(p_known timestamptz, p_elapsed numeric, p_tolerance numeric)
RETURNS TABLE (at timestamptz, set_by numeric)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_begun timestamptz := aftercall_now();  -- read before the lock is waited for: that wait is no jump
    v_clock reconciliation_clock;
    v_now timestamptz;
    v_by numeric := 0;
    v_first boolean;
BEGIN
    INSERT INTO reconciliation_clock (id, told, set_by) VALUES (1, v_begun, 0) ON CONFLICT DO NOTHING;
    v_first := FOUND;
    SELECT * INTO v_clock FROM reconciliation_clock FOR NO KEY UPDATE;
    v_now := aftercall_now();
    IF v_now < v_clock.told - p_tolerance * interval '1 second' THEN
        v_by := extract(epoch FROM v_now - v_clock.told);
        PERFORM ledger_follow_back(-v_by * interval '1 second');
        UPDATE reconciliation_clock c SET told = v_now, set_at = v_now, set_by = v_by,
               forward_at = c.forward_at + v_by * interval '1 second';
    ELSIF NOT v_first AND v_clock.told >= p_known  -- else what the caller knows is of another life of this database
          AND v_begun > p_known + (p_elapsed + p_tolerance) * interval '1 second'
          AND coalesce(v_clock.forward_at < p_known, true) THEN
        v_by := extract(epoch FROM v_begun - p_known) - p_elapsed;
        UPDATE reconciliation_clock SET told = v_now, set_at = v_now, set_by = v_by, forward_at = v_now;
    ELSE
        UPDATE reconciliation_clock SET told = greatest(told, v_now);
    END IF;
    at := v_now;
    set_by := v_by;
    RETURN NEXT;
END $$;

-- What ends at a moment ends as long from now as before the clock was set: nothing lives longer for it.
CREATE OR REPLACE FUNCTION ledger_follow_back(p_by interval) RETURNS void
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    UPDATE reconciliation_run r SET due_at = r.due_at - p_by, lease_until = r.lease_until - p_by
     WHERE r.due_at IS NOT NULL OR r.lease_until IS NOT NULL;
    UPDATE reconciliation_operation o SET due_at = o.due_at - p_by, lease_until = o.lease_until - p_by,
           not_before = o.not_before - p_by, same_key_until = o.same_key_until - p_by, escalate_at = o.escalate_at - p_by
     WHERE o.state NOT IN ('succeeded', 'failed_terminal', 'terminated');
    UPDATE reconciliation_approval a SET expires_at = a.expires_at - p_by, use_by = a.use_by - p_by,
           due_at = a.due_at - p_by
     WHERE a.state IN ('waiting', 'approved');
    UPDATE reconciliation_signal s SET tell_at = s.tell_at - p_by WHERE s.tell_at IS NOT NULL;  -- told no later for it
END $$;
