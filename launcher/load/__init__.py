"""The load generator: traces, prompts, the open loop, and figures from its records.

Start with `run`.
"""
