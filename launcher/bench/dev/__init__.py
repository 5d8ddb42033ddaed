"""Benchmarks of single parts of crossdock, for its developers.

Each file is one command of `crossdock bench dev`.
"""
