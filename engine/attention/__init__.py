"""Attention over a paged KV pool.

`paged` is the function that transformers calls; `batch_invariant` is the exact CPU kernel.
"""
