"""Estimated profiles against published measurements, and the shapes they are made of.

The files are not part of the project: Splitwise's measurements (Mutinifni/splitwise-sim, MIT) and DistServe's
(`test_distserve`). CROSSDOCK_DATA names their folder.
"""

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest

from launcher.tuning.profiles.estimate import shape_of
from runtime.settings.options import SettingsError
from tests.tuning import test_distserve as distserve
from tuning.advise import Workers
from tuning.estimates.cards import CARDS
from tuning.estimates.roofline import EstimateError, Roofline, estimated
from tuning.estimates.shapes import KNOWN, ShapeError, of_config
from tuning.profile import Profile, decoded, encoded, merged

SPLITWISE = distserve.FILE.with_name("splitwise_perf_model.csv")
MODELS = {"llama2-70b": "Llama-2-70B", "bloom-176b": "BLOOM-176B"}
OURS = {"a100-80gb": "A100-80GB-SXM", "h100-80gb": "H100-SXM"}


def profile(card: str, model: str, cards: int = 1, seqs_max: int = 64) -> Profile:
    return estimated(
        CARDS[card],
        KNOWN[model],
        cards,
        network_gbit_per_s=200.0,
        step_tokens=2048,
        seqs_max=seqs_max,
        cost_per_hour=0.0,
        about={"model": model},
    )


def published(hardware: str) -> dict[tuple[str, int, int, int, int], list[tuple[float, float]]]:
    """By model, cards, prompt tokens, batch and answer tokens: times of prompt and token."""
    found = defaultdict(list)
    with SPLITWISE.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["hardware"] == hardware:
                numbers = (int(row[name]) for name in ("tensor_parallel", "prompt_size", "batch_size", "token_size"))
                found[MODELS[row["model"]], *numbers].append((float(row["prompt_time"]), float(row["token_time"])))
    return found  # type: ignore[return-value]


@pytest.mark.skipif(not SPLITWISE.is_file(), reason=f"needs {SPLITWISE}; set CROSSDOCK_DATA")
@pytest.mark.parametrize("hardware", OURS)
def test_estimates_match_published_times(hardware: str) -> None:
    """Estimated times of prompts and tokens are within 15 % of published ones on average."""
    card, first, later = CARDS[OURS[hardware]], [], []
    for (model, cards, prompt, batch, answer), times in published(hardware).items():
        shape, line = KNOWN[model], Roofline(card, KNOWN[model], cards)
        prompt_ms, token_ms = (median(column) for column in zip(*times, strict=True))
        if 2 * shape.token_weights * prompt * batch > prompt_ms * cards * card.tflops * 1e9:
            continue  # less than the arithmetic takes at the card's peak: part of the batch was not run
        expected_ms = line.prefill_ms(prompt * batch) + line.context_ms * batch * prompt * prompt / 2
        first.append(abs(expected_ms / prompt_ms - 1))
        later.append(abs((line.decode_ms(batch) + line.kv_token_ms * batch * (prompt + answer / 2)) / token_ms - 1))
    assert len(first) > 70
    assert fmean(first) < 0.12
    assert fmean(later) < 0.15


@pytest.mark.skipif(not distserve.FILE.is_file(), reason=f"needs {distserve.FILE}; set CROSSDOCK_DATA")
def test_unfitted_ttft_is_predicted() -> None:
    """OPT-13B: its engine takes 26 ms for a decode step where memory takes 13, so later tokens are expected too early."""
    both = merged(
        profile("A100-80GB-SXM", "OPT-13B", 2, seqs_max=256), profile("A100-80GB-SXM", "OPT-13B", 1, seqs_max=256)
    )
    for run in distserve.runs():
        if run.rate_per_s <= 6:
            outcome = distserve.LateRoom(both, Workers(1, 1), run.sent, distserve.OPTIONS).run()
            ttft = np.nanmedian(outcome.ttft_ms) / np.median(run.ttft_ms) - 1
            tpot = np.nanmedian(outcome.tpot_ms) / np.median(run.tpot_ms[run.tpot_ms > 0]) - 1
            assert abs(ttft) < 0.15
            assert -0.5 < tpot < 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-2-7B", 6.74),
        ("Llama-2-70B", 68.98),
        ("Llama-3.1-8B", 8.03),
        ("Mixtral-8x7B", 46.7),
        ("Qwen2.5-32B", 32.8),
        ("Qwen3-30B-A3B", 30.5),
        ("OPT-13B", 12.85),
        ("BLOOM-176B", 176.2),
        ("SmolLM2-135M", 0.1345),
    ],
)
def test_parameter_counts_are_as_published(name: str, billions: float) -> None:
    assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def test_config_gives_known_shape(tmp_path: Path) -> None:
    """A model's config gives the same shape as the table of known models."""
    assert of_config(LLAMA) == KNOWN["Llama-3.1-8B"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert shape_of(str(tmp_path)) == shape_of("meta-llama/Llama-3.1-8B-Instruct") == KNOWN["Llama-3.1-8B"]
    experts = LLAMA | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    }
    assert of_config(experts) == KNOWN["Mixtral-8x7B"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_bad_config_names_the_fault(changes: dict[str, Any], why: str) -> None:
    """A config that cannot be used is refused with what is wrong in it."""
    with pytest.raises(ShapeError, match=why):
        of_config(LLAMA | changes)


def test_unknown_or_oversized_model_is_refused() -> None:
    """A model that is unknown or does not fit on its cards is refused with a reason."""
    with pytest.raises(SettingsError, match=r"neither a folder with a config.json nor one of .*Llama-3.1-8B"):
        shape_of("acme/Frob-9B")
    with pytest.raises(EstimateError, match="no room for KV; more cards for each worker: --tensor-parallel"):
        profile("L4", "Llama-3.1-70B")


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_every_card_gives_valid_profile(card: str, model: str) -> None:
    """Each card's profile is read as it was written, and its times rise with the size of steps."""
    made = profile(card, model, 4)
    assert decoded(encoded(made), "it") == made
    for curve in (made.prefill.curve, made.decode.curve):
        assert list(curve.ms) == sorted(curve.ms)
    assert made.prefill.curve(2048) < profile(card, model, 4).prefill.curve(4096)
    assert made.origin == "estimated"


def test_more_cards_compute_faster() -> None:
    """Four cards compute prompts faster than one and hold more than four times the KV blocks."""
    one, four = profile("H100-SXM", "Llama-3.1-8B", 1), profile("H100-SXM", "Llama-3.1-8B", 4)
    assert four.prefill.step_ms(2048, 0) < one.prefill.step_ms(2048, 0) < 4 * four.prefill.step_ms(2048, 0)
    assert four.decode_capacity.kv_blocks > 4 * one.decode_capacity.kv_blocks
