"""Receives KV, batches continuously on a paged pool, streams tokens to gateways. Never computes a prompt.

`batch` decides which sequences run in a step and what its results mean (pure); `requests` keeps what is held for each attempt
and when it is over (pure); `worker` is what the driver of every worker (`runtime.worker.driver`) needs of this role, with its
KV port and receiver; `compute` runs on the engine thread; `main` is the process.
"""
