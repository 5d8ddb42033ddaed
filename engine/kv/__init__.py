"""The paged KV pool: which sequence holds which block, and which blocks hold a known prefix. Pure.

Start with `allocator`.
"""
