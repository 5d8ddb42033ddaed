"""A cluster on one machine: its processes, their supervision, their logs.

Start with `serve`.
"""
