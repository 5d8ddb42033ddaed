"""The state of the core for people: `crossdock status` and metrics. Start with `status`."""
