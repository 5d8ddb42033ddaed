"""Commands for operators: status, drain, usage, tenants, keys, replay, explain.

Start with `status`.
"""
