"""The HTTP server: bounds on what clients may send, error replies, request ids and the access log.

Start with `server`.
"""
