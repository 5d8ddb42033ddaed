"""Attention over the paged KV pool, behind one interface.

Start with `interface`: `plan(batch) -> AttentionMetadata` once for a forward pass, `write` and `read` for each layer.
`torch_backend` is the readable reference, `triton_backend` the one for GPUs, with its kernels in `triton_kernels`. `paged` is
the function that transformers calls. The CPU kernels in `engine.cpu` compute attention inside their own forward pass.
"""
