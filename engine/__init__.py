"""What both worker kinds run: a transformers model over a paged KV pool, a sampler, and the bookkeeping of blocks.

    engine = load_engine(model, device="cpu", kv_bytes=1 << 30)
    logits = engine.forward([SeqChunk(tokens, start=0, blocks=table, wants_logits=True)])    # [1, vocab] float32
    [drawn] = sample(logits, [state]); state.accept(drawn.token)

- `loader`, `selfcheck`: finds and loads weights, refuses what cannot run (`ModelUnsupported`), compares the paged forward
  with the model's own.
- `thread`: the one thread that computes.
- `engine`: `Engine.forward` over packed chunks; the pool `[blocks, layers, 2, block_size, kv_heads, head_dim]`.
- `attention`, `plan`: the attention function registered with transformers, and what one forward prepares for it once.
- `batch_invariant`: attention on the CPU whose numbers for a token do not depend on what else is computed with it.
- `linear`: prepacked weights for small batches on the CPU.
- `sampler`, `draw`: `SamplerState`, `sample`; random numbers are a function of (seed, choice, token index).
- `blocks`, `prefix`, `sequence`, `finish`: pure bookkeeping: `BlockAllocator` with its prefix cache, `SequenceBlocks`,
  `finish_reason`.

An `Engine` belongs to one thread. Another thread may read or write blocks of `Engine.pool` that no chunk of a running
forward names. Those four import no torch; so this package file imports nothing.
"""
