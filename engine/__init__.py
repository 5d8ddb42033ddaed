"""The engine of both worker kinds: a transformers model over a paged KV pool, a sampler, and the bookkeeping of blocks.

    engine = load_engine(model, device="cpu", kv_bytes=1 << 30)
    logits = engine.forward([SeqChunk(tokens, start=0, blocks=table, wants_logits=True)])    # [1, vocab] float32
    [drawn] = sample(logits, [state]); state.accept(drawn.token)

- `model`: finds and loads weights, refuses models that cannot run (`ModelUnsupported`), and compares the paged forward with the
  model's own.
- `thread`: the one thread that computes.
- `engine`: `Engine.forward` over packed chunks; the pool `[blocks, layers, 2, block_size, kv_heads, head_dim]`.
- `cpu`: a forward pass in C for models of Llama's shape.
- `attention`: the attention function registered with transformers, and what one forward pass prepares for it.
- `sampling`: `SamplerState`, `sample` and `finish_reason`; random numbers are a function of (seed, choice, token index).
- `kv` (pure): `BlockAllocator` with its prefix cache, and block tables.

An `Engine` belongs to one thread. Another thread may read or write blocks of `Engine.pool` that no chunk of a running
forward names. `kv` and `sampling.finish` import no torch, so this file imports nothing.
"""
