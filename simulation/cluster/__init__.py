"""The virtual cluster: a real coordinator, prefill and decode workers with speeds and KV blocks, and clients, in virtual time.

It injects no faults (`tests.world.faults` does): tests and benchmarks put load on it and see how the coordinator handles it.
Start with `cluster`.
"""
