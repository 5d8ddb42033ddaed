"""Tools for those who work on crossdock; no part of the package.

Generators of reference pages, and what `scripts/` run: to try a cluster hard (`chaos`, `attacks`, `fuzz`, `kv_faults`), on
a GPU (`gpu`), or beside another program (`agree`, `live_autopilot`). These use the clusters of `tests/e2e`. Start with the
script of the same name, like `scripts/chaos --help`.
"""
