"""The CPU backend: a fused forward pass in C, batch-invariant by construction.

`kernels/` computes, from `forward.c` down; `library` builds and loads it; `recognise` finds out whether a model has the shape
that it knows; `weights` lays the model's weights out for it; `decoder` runs it.
"""
