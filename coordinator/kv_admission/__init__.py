"""Whether one more request can be admitted to a decode worker's KV pool without it ever running out. Pure.

Start with `admission`.
"""
