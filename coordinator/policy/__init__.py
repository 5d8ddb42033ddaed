"""Versions of the policy, and trials of one beside another. Start with `versions`."""
