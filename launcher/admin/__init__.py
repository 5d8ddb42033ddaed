"""Commands for operators: status, drain, usage, tenants, keys, replay, explain, simulate.

Start with `status`.
"""
