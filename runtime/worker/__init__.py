"""What both kinds of workers share: start, registration with the coordinator, drain.

Start with `process`.
"""
