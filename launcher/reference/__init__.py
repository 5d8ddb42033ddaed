"""References generated from the code: all options, all metrics, the life cycle of a request.

Run by hand after a change; tests hold them up to date.
"""
