"""Receives KV, batches continuously on a paged pool, streams tokens to gateways. Never computes a prompt.

`batch` decides which sequences run in a step and what its results mean (pure); `requests` keeps what is held for each attempt
and when it is over (pure); `compute` is what runs on the engine thread; `worker` drives links, engine thread and KV receiver;
`main` is the process.
"""
