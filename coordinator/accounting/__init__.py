"""Quotas, billing and the usage ledger.

Start with `billing`; `ledger` is the database.
"""
