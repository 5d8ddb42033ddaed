"""Draws tokens from logits, and says when a sequence ends.

Start with `sampler`; `draw` is what a row with a temperature goes through; `finish` says when a choice ends."""
