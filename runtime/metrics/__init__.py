"""Prometheus metrics of a process, and the port on which they are read.

Start with `registry`.
"""
