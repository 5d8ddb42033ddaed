"""Finds the folder on disk of what the user calls a model. Start with `resolve`."""
