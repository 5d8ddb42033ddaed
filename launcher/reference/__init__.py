"""References generated from the code: all options, all metrics.

Run by hand after a change; tests hold them up to date.
"""
