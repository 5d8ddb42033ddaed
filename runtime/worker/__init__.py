"""The part that both kinds of workers share: start, registration with the coordinator, steps, metrics, drain, end.

Start with `driver`; `role` is what it needs of a role, and `process` is what surrounds it.
"""
