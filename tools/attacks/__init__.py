"""Attacks on a real cluster, and what other tenants notice: `scripts/attacks`. Start reading in `__main__.py`."""
