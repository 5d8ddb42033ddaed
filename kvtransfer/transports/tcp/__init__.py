"""The transport `tcp`: authenticated and encrypted KV between any two hosts over plain sockets.

Start with `transport`; `handshake` states how the two ends prove their key.
"""
