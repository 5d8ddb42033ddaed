"""The client with which the load generator and the benchmarks talk to a server.

Start with `client`.
"""
