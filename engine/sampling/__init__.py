"""From logits to tokens, and when a sequence ends.

Start with `sampler`.
"""
