"""What the load generator and the benchmarks use to talk to a server.

Start with `client`.
"""
