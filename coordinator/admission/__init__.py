"""Requests of gateways: whether one is let in, and what its tenant may do. Pure.

Start with `intake`.
"""
