"""`crossdock batch`: offline work for people. Start with `run`."""
