"""Versions of the scheduling policy: which one is in force, which one is on trial, and for whom.

`versions` decides, `trial` makes one tenants table of two, and `keeper` reads, stores and answers `crossdock policy`.
"""
