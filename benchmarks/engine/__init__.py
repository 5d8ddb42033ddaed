"""`python -m benchmarks engine`: the engine of one worker against what its machine allows.

Start in `rounds`, which runs `cases` in turn with what `machine` measures; `floor` has the arithmetic, `command` the entry
point, and `llama_bench` runs llama.cpp's benchmark beside it.
"""
