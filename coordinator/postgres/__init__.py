"""`--database`: leadership, ledger and policies in PostgreSQL.

Start with `lease.py`, which decides who leads. `leader_lease.py` asks the database, and `database.py` has its tables."""
