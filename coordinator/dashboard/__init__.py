"""The page at `/dashboard` of the coordinator's metrics port. `snapshot.py` (pure) makes what it shows of the core's state,
`site.py` serves it, and `static/` has the page's files.
"""
