"""A Django app of somebody who connects: its table lives beside the ledger (AFTERCALL_APPS)."""
