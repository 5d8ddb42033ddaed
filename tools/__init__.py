"""Generators of reference pages, for those who work on crossdock. They are no part of the package."""
