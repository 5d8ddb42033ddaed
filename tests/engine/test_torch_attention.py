"""Every architecture through transformers with the attention backend `torch`, as it runs where no kernels know it."""

from pathlib import Path

import pytest

from engine.model import backend
from tests import tiny_models
from tests.engine import support
from tests.engine.test_exactness import prompts_of

COUNT = 10


@pytest.mark.parametrize("kind", list(tiny_models.KINDS))
def test_greedy_tokens_match_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of the torch attention backend equal those of transformers."""
    monkeypatch.setattr(backend, "_recognised", lambda *_: None)
    path = tiny_models.make(kind, tmp_path)
    prompts = prompts_of((1, 17, 40, 2, 33), seed=7)
    engine = support.load(path)
    assert engine.backend == "transformers (torch attention)"
    expected = support.plain_greedy(path, prompts, COUNT)
    assert support.engine_greedy(engine, prompts, COUNT, chunk=13, join_every=1) == expected
