"""The `crossdock` command: a cluster on one machine, its supervision, status and benchmarks."""
