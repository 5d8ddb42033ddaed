"""Runs a recognised model through the kernels, over the paged KV pool."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.attention.forward_batch import LOGITS_ROWS, SeqChunk, rows_of_logits
from engine.cpu import library
from engine.cpu.huge_pages import HugePages
from engine.cpu.recognise import LayerParts, ModelParts
from engine.cpu.weights import PackedWeights
from engine.triton_launch import KernelFailed

_POSITIONS: Final = 1024  # of one computation of rotary embeddings: fixed groups have reproducible bits
_ALIGNMENT: Final = 64  # a cache line
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class CpuDecoder:
    """Runs the CPU kernels over weights in their layout; keeps no reference to the original linear layers."""

    is_batch_invariant = True

    def __init__(self, parts: ModelParts, pool: torch.Tensor, context_tokens: int, format: str, threads: int) -> None:
        """`pool` [blocks, layers, 2, block_size, kv_heads, head_dim] float32."""
        self._library = library.load_kernels()
        self._library.start_threads(threads)
        self.backend = f"cpu ({library.instruction_set()}, {format} weights)"
        self.numerics = f"cpu kernels {library.source_hash()[:8]}, {format} weights"  # on any instruction set
        self._pool = pool
        self._block_size = pool.shape[3]
        self._context_tokens = context_tokens
        self._offset = 0  # position of a sequence's first token
        self._rotary = _RotaryTables(parts.rotary, parts.rotary_types, context_tokens)
        self._memory = HugePages()
        self._head = PackedWeights([parts.head], format, self._memory)
        self._vocab_size = self._head.rows
        tied = parts.embedding.data_ptr() == parts.head.weight.data_ptr()
        self._embedding = None if tied else parts.embedding.detach().float().clone()
        self._embedding_scale = parts.embedding_scale
        self._kept: list[object] = [pool, parts.norm]
        self._layers = (library.Layer * len(parts.layers))(*(self._layer(layer, format) for layer in parts.layers))
        routers = [layer.router for layer in parts.layers if layer.router is not None]
        self._experts_per_token = routers[0].experts_per_token if routers else 0
        self._model = library.KernelModel(
            self._layers, self._head.described(), parts.norm.data_ptr(), len(parts.layers), parts.norm.numel(),
            parts.heads, parts.kv_heads, parts.head_dim, parts.activation, self._block_size,
            self._experts_per_token, bool(routers) and routers[0].normalises, parts.epsilon, parts.scaling, parts.softcap,
            parts.residual, parts.logit_scale, parts.logit_softcap,
        )  # fmt: skip
        self._widths = self._buffer_widths(parts)
        self._buffers: dict[str, Floats] = {}
        self._rows = 0

    def _layer(self, parts: LayerParts, format: str) -> library.Layer:
        qkv, out = self._packed(parts.qkv, format), self._packed([parts.out], format)
        router = library.Linear() if parts.router is None else self._packed([parts.router.linear], "float32")
        mlps = (library.Mlp * len(parts.mlps))(
            *(library.Mlp(self._packed(mlp.gate_up, format), self._packed([mlp.down], format)) for mlp in parts.mlps)
        )
        norms = [parts.attention_norm, parts.mlp_norm, parts.attention_out_norm, parts.mlp_out_norm]
        norms += [parts.query_norm, parts.key_norm]
        self._kept += [mlps, *norms]
        pointers = [0 if norm is None else norm.data_ptr() for norm in norms]
        sizes = [0 if norm is None else norm.numel() for norm in norms[-2:]]
        experts = len(parts.mlps) if parts.router is not None else 0
        return library.Layer(qkv, out, router, mlps, experts, *pointers, *sizes, parts.window, parts.rotary)

    def _packed(self, parts: Sequence[nn.Linear], format: str) -> library.Linear:
        weights = PackedWeights(parts, format, self._memory)
        self._kept.append(weights)
        return weights.described()

    def _buffer_widths(self, parts: ModelParts) -> dict[str, int]:
        """Floats of a row in each buffer, in the order of `library.KernelBatch`; the last two hold int64."""
        hidden = parts.norm.numel()
        mlps = [layer.mlps[at] for layer in self._layers for at in range(max(layer.experts, 1))]
        padded = self._layers[0].out.outputs
        mixture = self._experts_per_token > 0
        return {
            "x": hidden,
            "normed": hidden,
            "qkv": max(*(layer.qkv.outputs for layer in self._layers), padded),
            "attended": parts.heads * parts.head_dim,
            "gate_up": max(
                padded, *(mlp.gate_up.outputs for mlp in mlps), *(layer.router.outputs for layer in self._layers)
            ),
            "gated": max(mlp.down.inputs for mlp in mlps),
            "routed": hidden * mixture,
            "expert_out": padded * mixture,
            "mixed": padded * mixture,
            "shares": self._experts_per_token,
            "chosen": 2 * self._experts_per_token,
            "expert_rows": 2 * mixture,
        }

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        """Writes the chunks' K and V to the pool; logits [chunks wanting them, vocab] float32."""
        arrays = _Arrays(chunks, self._block_size, self._pool.shape[0], self._context_tokens)
        rows = len(arrays.positions)
        self._make_room(rows)
        self._embed(arrays.tokens)
        cosine, sine = self._rotary.rows(arrays.positions + self._offset)
        logits = np.empty((len(arrays.wanted), self._head.outputs), dtype=np.float32)
        items = np.empty(len(chunks) + 1, dtype=np.int64)
        buffers = [self._buffers[name].ctypes.data for name in self._widths]
        batch = library.KernelBatch(
            cosine.ctypes.data, sine.ctypes.data, cosine.shape[2], rows, arrays.positions.ctypes.data,
            arrays.tables.ctypes.data, arrays.blocks.ctypes.data, arrays.chunks.ctypes.data, len(chunks),
            arrays.wanted.ctypes.data, len(arrays.wanted), self._pool.data_ptr(), *buffers, logits.ctypes.data,
        )  # fmt: skip
        self._library.forward(ctypes.byref(self._model), ctypes.byref(batch), items.ctypes.data)
        self._pass_logits(chunks)
        return torch.from_numpy(logits)[:, : self._vocab_size]

    def _pass_logits(self, chunks: Sequence[SeqChunk]) -> None:
        """Pass logits of all tokens to chunks with `on_logits`. `normed` still holds the last layer's output for each
        token."""
        normed, hidden = self._buffers["normed"], self._widths["normed"]
        room: Floats | None = None
        for on_logits, start, row, rows in rows_of_logits(chunks):
            if room is None:
                room = np.empty((LOGITS_ROWS, self._head.outputs), dtype=np.float32)
            self._library.project(
                ctypes.byref(self._model), normed.ctypes.data + 4 * row * hidden, room.ctypes.data, rows
            )
            on_logits(start, torch.from_numpy(room)[:rows, : self._vocab_size])

    @contextmanager
    def checked(self, window: int | None, offset: int) -> Iterator[None]:
        saved, self._offset = [layer.window for layer in self._layers], offset
        for layer in self._layers:
            layer.window = window if window and layer.window else layer.window
        try:
            yield
        finally:
            self._offset = 0
            for layer, before in zip(self._layers, saved, strict=True):
                layer.window = before

    def _make_room(self, rows: int) -> None:
        if rows > self._rows:
            self._rows = rows
            self._buffers = {name: _aligned(rows * width) for name, width in self._widths.items()}

    def _embed(self, tokens: Ints) -> None:
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError("a token is not in the vocabulary")
        ids = torch.from_numpy(tokens)
        rows = self._head.row(ids) if self._embedding is None else self._embedding[ids]
        if self._embedding_scale != 1.0:
            rows = rows * self._embedding_scale
        self._buffers["x"][: rows.numel()] = rows.flatten().numpy()


class _Arrays:
    """A batch in the form that the kernels take. Raises ValueError for inputs that would make them read or write out of
    bounds."""

    def __init__(self, chunks: Sequence[SeqChunk], block_size: int, blocks: int, context_tokens: int) -> None:
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
        lengths = np.fromiter((len(chunk.tokens) for chunk in chunks), np.int64, len(chunks))
        tables = np.fromiter((len(chunk.blocks) for chunk in chunks), np.int64, len(chunks))
        self.chunks: Ints = np.concatenate(([0], np.cumsum(lengths)))
        self.blocks: Ints = np.concatenate([np.asarray(chunk.blocks, np.int64) for chunk in chunks])
        self.tokens: Ints = np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks])
        firsts = np.concatenate(([0], np.cumsum(tables)[:-1]))
        self.tables: Ints = np.repeat(firsts, lengths)
        self.positions: Ints = np.arange(self.chunks[-1]) + np.repeat(starts - self.chunks[:-1], lengths)
        wants = np.fromiter((chunk.wants_logits for chunk in chunks), bool, len(chunks))
        self.wanted: Ints = np.ascontiguousarray(self.chunks[1:][wants] - 1)
        if lengths.min() < 1 or starts.min() < 0 or (starts + lengths).max() > context_tokens:
            raise ValueError("a chunk is empty or outside of the context")
        if (tables * block_size < starts + lengths).any():
            raise ValueError("a block table does not cover its chunk")
        if self.blocks.min() < 0 or self.blocks.max() >= blocks:
            raise ValueError("a block table names a block that the pool does not have")


class _RotaryTables:
    """Cosines and sines by position, as the model's own module computes them, for each type of layers. They are computed when
    they are first read, and the kernel gives memory only to those."""

    def __init__(self, rotary: torch.nn.Module, types: Sequence[str | None], context_tokens: int) -> None:
        """Raises KernelFailed."""
        self._rotary = rotary
        self._types = types
        self._context_tokens = context_tokens
        widths = {pair[0].shape[-1] for pair in self._pairs(0, 1)}
        if len(widths) > 1:
            raise KernelFailed(f"its rotary embeddings are of different sizes: {sorted(widths)}")
        self._tables: Floats = np.zeros((2, len(types), context_tokens, widths.pop()), np.float32)
        self._is_computed = np.zeros(-(-context_tokens // _POSITIONS), bool)

    def rows(self, positions: Ints) -> tuple[Floats, Floats]:
        """[tables, positions, rotary] each."""
        groups = positions // _POSITIONS
        for group in np.unique(groups[~self._is_computed[groups]]):
            start, end = group * _POSITIONS, min((group + 1) * _POSITIONS, self._context_tokens)
            for table, pair in enumerate(self._pairs(start, end)):
                for part in range(2):
                    self._tables[part, table, start:end] = pair[part][0].float().numpy()
            self._is_computed[group] = True
        cosine, sine = self._tables
        return np.ascontiguousarray(cosine[:, positions]), np.ascontiguousarray(sine[:, positions])

    def _pairs(self, start: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines [1, positions, rotary] of each type."""
        x, places = torch.zeros(1, 1, 1), torch.arange(start, end)[None]
        return [self._rotary(x, places) if kind is None else self._rotary(x, places, kind) for kind in self._types]


def _aligned(count: int) -> Floats:
    raw = np.zeros(4 * count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + 4 * count].view(np.float32)
