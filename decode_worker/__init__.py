"""Receives KV, batches continuously on a paged pool, and streams tokens to gateways. Computes no whole prompts.

`core` (pure) decides; start there. `batch` decides which sequences run in a step and what its results mean. `requests` keeps
the allocations of each attempt until it is over. `suffixes` computes what a prompt adds to KV that is here, `ended` keeps the
KV of answers, and `lending` sends it to prefill workers. `worker` is the role that the common driver
(`worker.driver`) runs, with its KV port and receiver. `compute` runs on the engine thread.
"""
