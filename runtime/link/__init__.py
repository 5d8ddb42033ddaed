"""Links between processes: ZeroMQ sockets, the handshake, heartbeats, CURVE keys.

Start with `server` (the accepting end) and `client` (the connecting end); `peer` is what both share.
"""
