-- The journal and the choices are appended to and nothing else. A row trigger does not see TRUNCATE; a statement trigger does.
CREATE OR REPLACE FUNCTION journal_is_append_only() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
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
