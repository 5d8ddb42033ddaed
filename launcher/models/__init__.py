"""From what the user calls a model to a folder on disk.

Start with `resolve`.
"""
