"""Grammars that an answer must match: compiled and matched by llguidance, within limits. Used by gateways and workers.

Start with `compiler`.
"""
