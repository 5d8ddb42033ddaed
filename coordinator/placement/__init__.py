"""Which worker serves a request and which chunks make up a step. Pure.

Start with `schedule`.
"""
