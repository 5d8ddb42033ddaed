"""What gateways ask for: whether a request is let in, and what its tenant may do. Pure.

Start with `intake`.
"""
