"""The virtual cluster: a real coordinator, prefill and decode workers with speeds and KV blocks, and clients, in virtual time.

It breaks nothing (that is `simulation.faults`): tests and benchmarks put load on it and look at what the coordinator makes of
it. Start with `cluster`.
"""
