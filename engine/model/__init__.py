"""Loading a model, examining it, and checking it before anything is served.

Start with `loader`.
"""
