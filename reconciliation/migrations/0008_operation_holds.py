"""What every row of an operation must hold, asked by one constraint through one function.

PostgreSQL reads the stored text of each CHECK of a table anew at every INSERT and UPDATE. Ten of them with lists of
states took a tenth of all the time that the server needed for an operation; one that calls a compiled function does not.
"""

from django.db import migrations

FUNCTION = """
CREATE FUNCTION public.operation_holds(
    p_state varchar, p_basis varchar, p_lease timestamptz, p_nonce uuid, p_due timestamptz, p_marked timestamptz,
    p_mark_reason varchar, p_unknown int[]
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    v_broken text;
BEGIN
    v_broken := CASE
        WHEN p_state NOT IN ('ready', 'awaiting_approval', 'pending', 'failed_retryable', 'ambiguous', 'succeeded',
                             'failed_terminal', 'terminated') THEN 'operation_state_known'
        WHEN p_basis NOT IN ('', 'receipt', 'look_up', 'claim', 'asserted') THEN 'operation_basis_known'
        -- Pending means claimed under a lease, and nothing else does.
        WHEN (p_lease IS NULL) = (p_state = 'pending') OR (p_nonce IS NULL) = (p_state = 'pending') THEN 'operation_pending_is_leased'
        -- A claim that nobody would ever look at again cannot be written.
        WHEN p_state = 'pending' AND p_due IS NULL THEN 'operation_pending_is_due'
        -- Unknown is watched by the sweep, or a person was called.
        WHEN p_state = 'ambiguous' AND p_due IS NULL AND p_marked IS NULL THEN 'operation_ambiguous_is_watched'
        -- Retryable means that no attempt was applied: an unknown one forbids it.
        WHEN p_state IN ('ready', 'failed_retryable') AND p_unknown <> '{}'
            THEN 'operation_retryable_knows_all_attempts'
        -- "Nothing may be sent until a person agrees" is no place for something that may have been sent.
        WHEN p_state = 'awaiting_approval' AND p_unknown <> '{}' THEN 'operation_awaiting_knows_all_attempts'
        -- The last attempt never speaks for an unknown earlier one.
        WHEN p_state = 'failed_terminal' AND p_unknown <> '{}' AND p_basis <> 'asserted'
            THEN 'operation_failed_knows_all_attempts'
        WHEN p_state = 'succeeded' AND p_basis = '' THEN 'operation_succeeded_has_basis'
        WHEN (p_marked IS NULL) <> (p_mark_reason = '') THEN 'operation_escalation_has_reason'
    END;
    IF v_broken IS NULL THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'An operation does not hold %: state %, basis %.', v_broken, p_state, p_basis
        USING ERRCODE = '23514', TABLE = 'reconciliation_operation', CONSTRAINT = v_broken;
END $$;
"""
CONSTRAINT = """
ALTER TABLE public.reconciliation_operation ADD CONSTRAINT operation_holds CHECK (public.operation_holds(
    state, basis, lease_until, claim_nonce, due_at, escalated_at, escalation_reason, unknown_attempts));
"""
REPLACED = (
    "operation_state_known",
    "operation_basis_known",
    "operation_pending_is_leased",
    "operation_pending_is_due",
    "operation_ambiguous_is_watched",
    "operation_retryable_knows_all_attempts",
    "operation_awaiting_knows_all_attempts",
    "operation_failed_knows_all_attempts",
    "operation_succeeded_has_basis",
    "operation_escalation_has_reason",
)


class Migration(migrations.Migration):
    dependencies = [("reconciliation", "0007_local_effects")]
    operations = [
        migrations.RunSQL(FUNCTION, "DROP FUNCTION public.operation_holds"),
        migrations.RunSQL(CONSTRAINT, "ALTER TABLE public.reconciliation_operation DROP CONSTRAINT operation_holds"),
        *(migrations.RemoveConstraint(model_name="operation", name=name) for name in REPLACED),
    ]
