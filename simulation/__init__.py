"""Runs the coordinator's and both workers' cores in virtual time under load.

`cluster` has the virtual cluster, `load` its traffic and the figures. Start with `load/run.py`. Faults are injected
by `tests/world` instead.
"""
