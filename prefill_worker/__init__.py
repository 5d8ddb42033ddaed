"""Runs the prompt chunks it is told to run, draws the first token, and pushes KV as chunks finish.

`prompts` is the pure bookkeeping of what is held and when it may be let go; `worker` is what the driver of every worker
(`runtime.worker.driver`) needs of this role, with its KV sender; `compute` runs on the engine thread; `main` is the process.
"""
