"""The virtual cluster: a real coordinator, prefill and decode workers with speeds and KV blocks, and clients, in virtual time.

`cluster` has it; tests and benchmarks put load on it. A `workload` says what comes and what fails, `run` plays it, and
`figures` sums it up. Other faults are injected in `tests.world.faults`.
"""
