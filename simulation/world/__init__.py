"""Virtual time, a simulated network and the links over it, and a toy model whose tokens are known.

Start with `world`.
"""
