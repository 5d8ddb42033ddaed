"""Workers and gateways that come, go or drain, and the lock of the leader. Start with `processes`."""
