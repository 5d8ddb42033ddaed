"""Step times from NVIDIA's tables of measured operators (aiconfigurator-core). It is an extra, and imported only when a profile
is estimated."""

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lab.estimates.cards import Card
from lab.estimates.roofline import MEMORY_SHARE, SIZES, EstimateError
from lab.estimates.shapes import Shape, config_of

PACKAGE: Final = "aiconfigurator-core"
SYSTEM_VERSION: Final = "current"  # the tables that their maintainers have completed last
CONTEXT: Final = 1024  # of each sequence, in the decode steps that the curve goes through
LONGER: Final = 4096  # with this one beside it, reading KV is told apart
BATCH: Final = 64  # in both
CHUNK, BEFORE = 2048, 8192  # tokens of a prefill step, and before it, that show what context costs
UNLIMITED_BYTES: Final = 1 << 50


def are_installed() -> bool:
    return find_spec("aiconfigurator_core") is not None


class MeasuredTables:
    """The times of a worker of so many cards. `model`: a folder with a config.json, a name of a model whose config.json the
    package brings (`bundled`), or a shape. Raises `EstimateError` if an operator was not measured."""

    def __init__(
        self, card: Card, model: str | Shape, cards: int, backend: str, *, step_tokens: int, seqs_max: int
    ) -> None:
        if not card.system:
            raise EstimateError("no operator was measured on this card")
        self._backend = backend
        with _quiet(), _source(model) as path:
            weights = "fp8" if isinstance(model, Shape) and model.weight_bytes == 1 else ""
            try:
                self._read(card.system, path, cards, weights, (step_tokens, seqs_max))
            except (RuntimeError, ValueError, LookupError, AttributeError) as error:
                raise EstimateError(str(error).partition(" at /")[0]) from None

    def _read(self, system: str, path: str, cards: int, weights: str, most: tuple[int, int]) -> None:
        from aiconfigurator_core.sdk import EngineHandle, estimate_kv_cache
        from aiconfigurator_core.sdk.perf_database import resolve_query_version
        from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

        backend = self._backend
        what: dict[str, Any] = {"tp_size": cards, "moe_tp_size": cards, "moe_ep_size": 1}
        if weights:
            what |= {"gemm_quant_mode": weights, "moe_quant_mode": weights}
        self.backend_version = resolve_query_version(system, backend, SYSTEM_VERSION)
        handle = EngineHandle.compile(path, system, backend, backend_version=SYSTEM_VERSION, **what)
        self._decode: dict[int, float] = {
            one: handle.predict_decode_latency(one, CONTEXT) for one in SIZES if one <= max(most[1], 1)
        }
        of_kv_ms = handle.predict_decode_latency(BATCH, LONGER) - handle.predict_decode_latency(BATCH, CONTEXT)
        self.kv_token_ms: float = max(of_kv_ms, 0.0) / (BATCH * (LONGER - CONTEXT))
        self._prefill: dict[int, float] = {one: handle.predict_prefill_latency(1, one) for one in SIZES if one >= 16}
        of_context_ms = handle.predict_prefill_latency(1, BEFORE + CHUNK, BEFORE) - self._prefill[CHUNK]
        self.context_ms: float = max(of_context_ms, 0.0) / (CHUNK * BEFORE)
        # A token beside so many others takes twice as long.
        each_ms = self._prefill[CHUNK] / CHUNK
        self.attention_tokens = max(round(each_ms / self.context_ms), 1) if self.context_ms else 0
        parts = handle.decode_step_per_op(1, CONTEXT, 2)
        self.measured_share = sum(part[1] for part in parts if part[3] == "silicon") / sum(part[1] for part in parts)
        info = get_model_config_from_model_path(path)
        self.context_tokens = int(info["context"])
        room: dict[str, Any] = {
            "backend_version": SYSTEM_VERSION,
            "max_num_tokens": most[0],
            "max_batch_size": most[1],
            "memory_fraction_kind": "of_free" if backend == "trtllm" else "of_total",
            "memory_fraction_value": MEMORY_SHARE,
        }
        whole = estimate_kv_cache(
            path, system, backend, **room, **(what | {"tp_size": 1, "moe_tp_size": 1}),
            gpu_memory_capacity_bytes_override=UNLIMITED_BYTES,
        )  # fmt: skip
        self.kv_bytes = float(whole["kv_size_per_token_bytes"])
        self.weight_gib = whole["memory_breakdown"]["weights_bytes"] / 2**30
        self._kv_tokens = int(estimate_kv_cache(path, system, backend, **room, **what)["total_kv_size_tokens"])

    def prefill_ms(self, tokens: int) -> float:
        return float(max(self._prefill[tokens] - self.context_ms * tokens * tokens / 2, 1e-3))

    def decode_ms(self, sequences: int) -> float:
        return float(max(self._decode[sequences] - self.kv_token_ms * sequences * CONTEXT, 1e-3))

    def kv_tokens(self) -> int:
        return self._kv_tokens

    def about(self) -> dict[str, Any]:
        return {
            "source": f"operators measured with {self._backend} {self.backend_version} ({PACKAGE} {version(PACKAGE)})",
            "backend": self._backend,
            "backend_version": self.backend_version,
            "measured_share": round(self.measured_share, 3),
        }


def bundled(name: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the whole name and the config.json of a model that the package brings."""
    if not are_installed():
        return None
    from aiconfigurator_core.sdk.common import DefaultHFModels
    from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

    known = {_short(one): one for one in sorted(DefaultHFModels)}
    if (path := known.get(_short(name))) is None:
        return None
    with _quiet():
        return path, dict(get_model_config_from_model_path(path)["raw_config"])


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower().removeprefix("meta-")


@contextlib.contextmanager
def _source(model: str | Shape) -> Iterator[str]:
    if isinstance(model, str):
        yield model
        return
    if model.mlp_matrices != 3:
        raise EstimateError("no model with two matrices in its MLP was measured")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(model)))
        yield folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The package warns about tables that it does not need."""
    log = logging.getLogger("aiconfigurator_core")
    before, log.level = log.level, logging.CRITICAL
    try:
        yield
    finally:
        log.level = before
