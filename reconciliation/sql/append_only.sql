-- The journal and the choices are appended to and nothing else, but for what retention.sql prunes or shreds: it names
-- its one subject in a setting of its transaction, and nobody else has the right to delete or change a row. A row trigger does not see TRUNCATE; a statement trigger does.
CREATE OR REPLACE FUNCTION journal_is_append_only() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_pruning text := coalesce(current_setting('aftercall.pruning', true), '');
    v_row jsonb;
BEGIN
    IF v_pruning <> '' AND TG_LEVEL = 'ROW' THEN
        v_row := to_jsonb(OLD);
        IF v_pruning IN ('operation:' || (v_row->>'operation_id'), 'run:' || (v_row->>'run_id')) THEN
            IF TG_OP = 'DELETE' THEN
                RETURN OLD;
            ELSIF NEW.sealed = '' AND to_jsonb(NEW) - 'sealed' = v_row - 'sealed' THEN
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
