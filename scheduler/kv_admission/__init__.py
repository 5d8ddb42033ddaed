"""Whether one more request can be admitted to a decode worker's KV pool without it ever running out; and what is kept of
conversations where there is room. Pure.

Start with `admission` and `sessions`.
"""
