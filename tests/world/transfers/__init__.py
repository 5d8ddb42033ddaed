"""KV transfers between simulated workers: the production sessions under a thin model of their drivers.

Start with `transfer`.
"""
