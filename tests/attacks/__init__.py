"""Attacks on a real cluster, and what other tenants notice of them: `scripts/attacks`. `__main__.py` has the order of events."""
