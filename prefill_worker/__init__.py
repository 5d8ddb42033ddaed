"""Runs the prompt chunks it is told to run, draws the first token, and pushes KV as chunks finish.

`prompts` is the pure bookkeeping of what is held and when it may be let go; `worker` drives links, engine thread and KV
sender; `compute` is what runs on the engine thread; `main` is the process.
"""
