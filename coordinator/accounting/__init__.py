"""Quotas, billing, goodput and the usage ledger. Start with `billing`; `ledger` is the database."""
