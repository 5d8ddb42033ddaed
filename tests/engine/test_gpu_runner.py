"""The GPU runner, on a CPU: its replay is a plain call on its static buffers."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from decode_worker.batch import StepPlan, StepRow
from decode_worker.compute import run_ahead
from engine.engine import Engine, SeqChunk
from engine.gpu.ops import TorchOps
from engine.gpu.replay import GraphReplay, buckets
from engine.gpu.runner import GpuRunner
from engine.gpu.weights import fuse
from engine.kv.allocator import BlockAllocator
from engine.model import backend
from engine.model.backend import recognised
from engine.model.loader import load_engine
from engine.pipeline import DecodeRow
from engine.sampling.sampler import SamplerState, sample
from proto.sampling import Sampling
from tests import tiny_models
from tests.engine import support
from tests.engine.gpu_runners import ROWS_MAX, PipelinedStream, candidate_of, gpu_engine
from tests.engine.test_exactness import prompts_of

RECOGNISED = ("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "smollm3")
GREEDY = Sampling(max_tokens=99, temperature=0.0)
SAMPLINGS = (
    GREEDY,
    Sampling(max_tokens=99, temperature=1.0, seed=1),
    Sampling(max_tokens=99, temperature=1.5, top_p=0.8, seed=2, logprobs=3),
    Sampling(max_tokens=99, temperature=0.9, top_k=20, repetition_penalty=1.3, seed=3),
    Sampling(max_tokens=99, temperature=1.0, frequency_penalty=0.7, presence_penalty=0.5, seed=4, logprobs=0),
    Sampling(max_tokens=99, temperature=0.0, logit_bias=((9, 3.5), (11, -100.0)), logprobs=2),
)
FORBIDDING = (
    Sampling(max_tokens=99, temperature=1.0, seed=1, grammar="parity"),
    Sampling(
        max_tokens=99, temperature=1.0, seed=2, bad_words=((20,), (30, 31)), allowed_token_ids=tuple(range(20, 40))
    ),
    Sampling(max_tokens=99, temperature=1.2, seed=3, min_tokens=9, stop_token_ids=tuple(range(6, 300))),
)


class OtherParity:
    """A constraint: tokens must not be of the last one's parity."""

    def __init__(self) -> None:
        self._parity = 0

    def mask(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        masked = row.copy()
        masked[self._parity :: 2] = -np.inf
        return masked

    def accept(self, token: int) -> None:
        self._parity = token % 2


def pipelined(
    engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], count: int, join_every: int = 0
) -> list[list[int]]:
    """Tokens of all prompts, decoded one step ahead; prompt i joins at step i * join_every."""
    pipeline = engine.pipeline
    assert pipeline is not None
    allocator = BlockAllocator(engine.blocks)
    allocator.free(allocator.allocate(engine.blocks)[::-1])
    streams = [PipelinedStream(engine, allocator, *both) for both in zip(prompts, samplings, strict=True)]
    for stream in streams:
        [first] = sample(stream.logits[None], [stream.state])
        assert first is not None
        stream.state.accept(first.token)
        stream.output.append(first.token)
    under_way: list[list[PipelinedStream]] = []
    step = 0
    while True:
        going = [s for i, s in enumerate(streams) if s.planned + 1 < count and step >= i * join_every]
        waiting = [s for s in streams if s.planned + 1 < count]
        step += 1
        if going:
            pipeline.launch([stream.row() for stream in going], [])
            under_way.append(going)
        elif waiting:
            continue
        if len(under_way) == 2 or (under_way and not going):
            for stream, drawn in zip(under_way.pop(0), pipeline.collect(), strict=True):
                assert drawn is not None
                stream.output.append(drawn.token)
        if not under_way and not waiting:
            return [stream.output for stream in streams]


def state_of(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> SamplerState:
    constraint = OtherParity() if sampling.grammar else None
    return SamplerState(sampling, 0, engine.info.vocab_size, prompt, constraint=constraint)


def one_by_one(engine: Engine, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """By plain forward passes and the sampler of the host."""
    stream = support.Stream(engine, BlockAllocator(engine.blocks), prompt)
    state = state_of(engine, prompt, sampling)
    while len(stream.output) < count:
        [drawn] = sample(engine.forward([stream.next_chunk(4096)]), [state])
        assert drawn is not None
        state.accept(drawn.token)
        stream.known.append(drawn.token)
    return stream.output


@pytest.mark.parametrize("kind", RECOGNISED)
def test_greedy_tokens_match_transformers(kind: str, tmp_path: Path) -> None:
    """Greedy tokens equal those of transformers, with and without the pipeline."""
    path = tiny_models.make(kind, tmp_path)
    prompts = prompts_of((1, 16, 40), seed=7)
    expected = support.plain_greedy(path, prompts, 12)
    engine = gpu_engine(path)
    assert support.engine_greedy(engine, prompts, 12, chunk=13) == expected, "in chunks, without the pipeline"
    assert pipelined(engine, prompts, [GREEDY] * 3, 12) == expected
    assert pipelined(engine, prompts, [GREEDY] * 3, 12, join_every=3) == expected, "joining at every third step"


def test_pipeline_draws_match_host_draws(tmp_path: Path) -> None:
    """The pipeline draws the same tokens as the host, also when slots are used again."""
    engine = gpu_engine(tiny_models.make("llama", tmp_path, spread=0.1))
    prompts = prompts_of((5, 9, 20, 3, 17, 8), seed=1)
    expected = [one_by_one(engine, *both, 20) for both in zip(prompts, SAMPLINGS, strict=True)]
    assert pipelined(engine, prompts, SAMPLINGS, 20, join_every=2) == expected
    assert pipelined(engine, prompts[::-1], SAMPLINGS[::-1], 20) == expected[::-1], "slots are used again"


def test_dependent_draws_wait_for_last_token(tmp_path: Path) -> None:
    """A grammar, bad words and the least length, beside a stream that runs ahead; through the decode worker's steps."""
    engine = gpu_engine(tiny_models.make("llama", tmp_path, spread=0.1))
    samplings = (*FORBIDDING, Sampling(max_tokens=99, temperature=1.0, seed=4))
    prompts = prompts_of((5, 9, 20, 3), seed=1)
    expected = [one_by_one(engine, *both, 12) for both in zip(prompts, samplings, strict=True)]
    allocator = BlockAllocator(engine.blocks)
    streams = [
        PipelinedStream(engine, allocator, p, s, state_of(engine, p, s))
        for p, s in zip(prompts, samplings, strict=True)
    ]
    for stream in streams:
        [first] = sample(stream.logits[None], [stream.state])
        assert first is not None
        stream.state.accept(first.token)
        stream.output.append(first.token)
    assert engine.pipeline is not None
    for step in range(12):
        made = [stream.row() for stream in streams] if step < 11 else []
        rows: tuple[Any, ...] = tuple(
            StepRow(cast(Any, r.sequence), r.token, r.position, tuple(r.table), r.index) for r in made
        )
        plan = StepPlan(rows, ()) if rows else None
        drawn = run_ahead(engine, engine.pipeline, plan, collects=step > 0).drawn
        for stream, draw in zip(streams, drawn or (), strict=False):
            assert draw is not None
            stream.output.append(draw[0])
    assert [stream.output for stream in streams] == expected
    assert all(a % 2 != b % 2 for a, b in pairwise(streams[0].output))


def test_nonfinite_row_fails_alone(tmp_path: Path) -> None:
    """A row with NaN gets no token, and the row beside it still gets one."""
    engine = gpu_engine(tiny_models.make("llama", tmp_path))
    allocator = BlockAllocator(engine.blocks)
    streams = [PipelinedStream(engine, allocator, prompt, GREEDY) for prompt in prompts_of((5, 9), seed=1)]
    for stream in streams:
        stream.output.append(7)
    engine.pool[streams[0].blocks.table] = torch.nan
    assert engine.pipeline is not None
    engine.pipeline.launch([stream.row() for stream in streams], [])
    engine.pipeline.launch([stream.row() for stream in streams], [])
    first, second = engine.pipeline.collect(), engine.pipeline.collect()
    assert first[0] is None and second[0] is None and first[1] is not None and second[1] is not None


def test_steps_after_failure_are_correct(tmp_path: Path) -> None:
    """The pipeline gives the same tokens as before once a launched step was abandoned."""
    engine = gpu_engine(tiny_models.make("llama", tmp_path))
    prompts = prompts_of((5, 9), seed=1)
    expected = pipelined(engine, prompts, [GREEDY] * 2, 8)
    stream = PipelinedStream(engine, BlockAllocator(engine.blocks), prompts[0], GREEDY)
    stream.output.append(7)
    assert engine.pipeline is not None
    engine.pipeline.launch([stream.row()], [])
    engine.pipeline.abandon()
    assert pipelined(engine, prompts, [GREEDY] * 2, 8) == expected


def test_rows_outside_buffers_are_refused(tmp_path: Path) -> None:
    """On a GPU it would end the process, or change another stream."""
    engine = gpu_engine(tiny_models.make("llama", tmp_path))
    context, size = engine.info.context_tokens, engine.info.block_size
    state = SamplerState(GREEDY, 0, engine.info.vocab_size, [])
    covering = tuple(range(-(-context // size)))
    rows = {
        "context": DecodeRow("long", 7, context, (*covering, 0), state, 1),
        "outside": DecodeRow("uncovered", 7, size, (3,), state, 1),
        "table": DecodeRow("many blocks", 7, 5, (*covering, 0), state, 1),
    }
    assert engine.pipeline is not None
    for why, row in rows.items():
        with pytest.raises(ValueError, match=why):
            engine.pipeline.launch([row], [])
    with pytest.raises(ValueError, match="sequences"):
        engine.pipeline.launch([DecodeRow(name, 7, 5, (3,), state, 1) for name in range(ROWS_MAX + 1)], [])
    for chunk in (
        SeqChunk([7] * 2, context - 1, range(len(covering) + 1), True),
        SeqChunk([7], 0, [engine.blocks], True),
        SeqChunk([7] * 2, size - 1, [1], True),
        SeqChunk([], 0, [1], True),
    ):
        with pytest.raises(ValueError, match=r"context|pool|cover|empty"):
            engine.forward([chunk])


def test_fused_weights_are_stored_once(tmp_path: Path) -> None:
    """Fused weights share their storage with the model, which still gives the same logits."""
    path = tiny_models.make("qwen2", tmp_path)
    candidate, _ = candidate_of(path)
    ids = torch.tensor([[7, 8, 9]])
    before = candidate.model(input_ids=ids).logits
    weights = fuse(recognised(candidate), 64)
    attention = candidate.model.model.layers[1].self_attn
    storages = {
        one.weight.untyped_storage().data_ptr() for one in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert storages == {weights.layers[1].qkv.weight.untyped_storage().data_ptr()}
    assert torch.allclose(candidate.model(input_ids=ids).logits, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_half_precision_models_load(kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the kernels do not know, too: transformers runs them."""
    monkeypatch.setattr(backend.BackendCandidate, "on_gpu", True)
    monkeypatch.setattr(backend, "make_ops", TorchOps)
    path = tiny_models.make(kind, tmp_path, spread=0.05)
    engine = load_engine(str(path), dtype=dtype, kv_bytes=support.KV_BYTES)
    assert engine.backend.startswith("gpu") == (kind in RECOGNISED), engine.backend


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_half_precision_routers_are_recognised(kind: str, tmp_path: Path) -> None:
    """The router of a mixture of experts is recognised in bfloat16."""
    candidate, _ = candidate_of(tiny_models.make(kind, tmp_path))
    candidate.model.to(torch.bfloat16)
    router = recognised(candidate).layers[0].router
    assert router is not None and router.experts_per_token == 2


def test_buckets_cover_all_row_counts() -> None:
    """The buckets ascend and end with the largest number of rows."""
    for most in (1, 3, ROWS_MAX, 8, 9, 64):
        assert buckets(most)[-1] == most and list(buckets(most)) == sorted(set(buckets(most)))
    assert buckets(20) == (1, 2, 4, 8, 16, 20)


def test_bucket_padding_rows_are_counted() -> None:
    """Rows that only fill a bucket up are counted as padding."""
    ran: list[int] = []
    replay = GraphReplay(ran.append, 20)
    for rows in (1, 3, 9, 20):
        replay.run(rows)
    assert ran == [1, 4, 16, 20] and replay.padding_rows == 1 + 7


def test_warm_up_leaves_pool_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up runs chunks up to one context long and writes nothing to the pool."""
    engine = gpu_engine(tiny_models.make("llama", tmp_path))
    assert isinstance(engine.runner, GpuRunner)
    counts: list[int] = []
    forward = engine.runner.forward
    monkeypatch.setattr(
        engine.runner, "forward", lambda chunks: (counts.append(len(chunks[0].tokens)), forward(chunks))[1]
    )
    engine.runner.warm_up()
    assert counts == [1, 2, 64, 128, 512], "no more than a context"
    assert not engine.pool.any()
