"""Benchmarks of single parts of crossdock, for its developers: `python -m benchmarks`. They are no part of the package."""
