-- The journal is appended to and nothing else. A row trigger does not see TRUNCATE; a statement trigger does.
CREATE OR REPLACE FUNCTION journal_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the journal is append-only: % refused', TG_OP USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER journal_keeps_rows BEFORE UPDATE OR DELETE ON reconciliation_journalentry
    FOR EACH ROW EXECUTE FUNCTION journal_is_append_only();
CREATE TRIGGER journal_keeps_table BEFORE TRUNCATE ON reconciliation_journalentry
    FOR EACH STATEMENT EXECUTE FUNCTION journal_is_append_only();
