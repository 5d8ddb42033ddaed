"""Workers and gateways that come, go or drain; the leader lock; stalls of the coordinator itself.

Start with `members`.
"""
