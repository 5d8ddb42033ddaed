"""Runs the prompt chunks it is told to run, draws the first token, and pushes KV as chunks finish.

`core` (pure) decides; start there. `fetches` gets KV from decode workers, `tier` keeps blocks in a second tier.
`prompts` is the pure bookkeeping of prompts and when their blocks are freed. `worker` is the role that the common driver
(`worker.driver`) runs, with its KV sender. `compute` runs on the engine thread.
"""
