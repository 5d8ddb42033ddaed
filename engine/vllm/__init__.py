"""vLLM as the engine of a worker: its model code, kernels, quantization and CUDA graphs; crossdock's blocks, steps and draws.

The worker computes as with the own engine: it composes each step, owns the blocks of the KV pool, and draws tokens from
logits. So everything that rests on these holds for every model that vLLM runs: the order of chunks, prefix cache, hand-over
of finished blocks, exact continuation, grammars, log-probabilities. vLLM's scheduler, block manager and sampler are not used.

- `load`: makes vLLM's executor, has it allocate one pool with whole blocks in one run of bytes, and checks the model.
- `runner`: `Engine.forward` by vLLM's model runner: rows are written where its scheduler would have it write them.
- `options`: vLLM's own options, those refused, and the versions that are supported.

This package runs in vLLM's own Python environment, so it imports nothing beside vLLM's dependencies, structlog and xxhash.
"""
