"""KV memory: the layout of blocks, pools as rows of bytes, copies, digests, memory shared with other processes.

Start with `layout`.
"""
