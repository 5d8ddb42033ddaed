"""Deficit round robin over priority classes, organisations and tenants, and one tenant's own order. Pure.

Start with `fair_queue`.
"""
