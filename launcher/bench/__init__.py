"""Benchmarks of a served cluster: serve, compare, ratio.

Benchmarks of single parts are in `dev`.
"""
