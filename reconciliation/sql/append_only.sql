-- The journal and the choices are appended to and nothing else, but for what retention.sql prunes or shreds: it names
-- its one subject in a setting of its transaction, and nobody else has the right to delete or change a row. A row trigger does not see TRUNCATE; a statement trigger does.
CREATE OR REPLACE FUNCTION journal_is_append_only() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_pruning text := coalesce(current_setting('aftercall.pruning', true), '');
    v_sealed text := CASE TG_TABLE_NAME WHEN 'reconciliation_chosen' THEN 'value_sealed' ELSE 'sealed' END;
    v_row jsonb;
BEGIN
    IF v_pruning <> '' AND TG_LEVEL = 'ROW' THEN
        v_row := to_jsonb(OLD);
        IF v_pruning IN ('operation:' || (v_row->>'operation_id'), 'run:' || (v_row->>'run_id')) THEN
            IF TG_OP = 'DELETE' THEN
                RETURN OLD;
            ELSIF to_jsonb(NEW)->>v_sealed = '' AND to_jsonb(NEW) - v_sealed = v_row - v_sealed
                  AND v_row->>'valid' IS DISTINCT FROM 'true' THEN  -- a choice that counts is read by later undos
                RETURN NEW;
            END IF;
        END IF;
    END IF;
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'insufficient_privilege';
END $$;
DROP TRIGGER IF EXISTS journal_keeps_rows ON reconciliation_journalentry;
CREATE TRIGGER journal_keeps_rows BEFORE UPDATE OR DELETE ON reconciliation_journalentry
    FOR EACH ROW EXECUTE FUNCTION journal_is_append_only();
DROP TRIGGER IF EXISTS journal_keeps_table ON reconciliation_journalentry;
CREATE TRIGGER journal_keeps_table BEFORE TRUNCATE ON reconciliation_journalentry
    FOR EACH STATEMENT EXECUTE FUNCTION journal_is_append_only();

DROP TRIGGER IF EXISTS chosen_keeps_rows ON reconciliation_chosen;
CREATE TRIGGER chosen_keeps_rows BEFORE UPDATE OR DELETE ON reconciliation_chosen
    FOR EACH ROW EXECUTE FUNCTION journal_is_append_only();
DROP TRIGGER IF EXISTS chosen_keeps_table ON reconciliation_chosen;
CREATE TRIGGER chosen_keeps_table BEFORE TRUNCATE ON reconciliation_chosen
    FOR EACH STATEMENT EXECUTE FUNCTION journal_is_append_only();

-- The other half of the references that no foreign key keeps: nothing goes while something refers to it. A foreign key
-- asks at every commit whether what is referred to exists; ledger_open() and ledger_journal() hold it locked and know.
CREATE OR REPLACE FUNCTION references_are_kept() RETURNS trigger LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'reconciliation_run' THEN
        PERFORM 1 FROM reconciliation_operation o WHERE o.run_id = OLD.id
          UNION ALL SELECT 1 FROM reconciliation_journalentry j WHERE j.run_id = OLD.id;
    ELSE
        PERFORM 1 FROM reconciliation_operation o WHERE o.undo_of_id = OLD.id
          UNION ALL SELECT 1 FROM reconciliation_journalentry j WHERE j.operation_id = OLD.id;
    END IF;
    IF FOUND THEN
        RAISE EXCEPTION 'Row % of % is still referred to and cannot be deleted.', OLD.id, TG_TABLE_NAME
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN OLD;
END $$;
DROP TRIGGER IF EXISTS operation_is_referred_to ON reconciliation_operation;
CREATE TRIGGER operation_is_referred_to BEFORE DELETE ON reconciliation_operation
    FOR EACH ROW EXECUTE FUNCTION references_are_kept();
DROP TRIGGER IF EXISTS run_is_referred_to ON reconciliation_run;
CREATE TRIGGER run_is_referred_to BEFORE DELETE ON reconciliation_run
    FOR EACH ROW EXECUTE FUNCTION references_are_kept();
