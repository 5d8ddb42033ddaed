"""Receives KV, batches continuously on a paged pool, streams tokens to gateways. Never computes a prompt.

`batch` decides which sequences run in a step and what its results mean (pure). `requests` keeps the allocations of each
attempt until it is over (pure). `worker` is the role that the common driver (`runtime.worker.driver`) runs, with its KV port
and receiver. `compute` runs on the engine thread.
"""
