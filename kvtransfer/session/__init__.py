"""The state machines of one transfer, for the sender and for the receiver. Pure.

Start with `session`, which states the rules.
"""
