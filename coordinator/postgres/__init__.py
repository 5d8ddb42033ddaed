"""`--database`: leadership, ledger and policies in PostgreSQL.

Start with `leader_lease.py`, which waits for the lease (`runtime.lease`); `database.py` has the ledger's tables."""
