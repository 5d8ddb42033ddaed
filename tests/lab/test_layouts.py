"""Layouts of cards: degrees of tensor parallelism as kinds of workers, the search over them, and the file that starts one."""

import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from lab.commands import check as tune_check
from lab.commands import tune
from lab.commands.profiles.estimate import model_of, worker_profile
from lab.commands.settings import TuneCheckSettings, TuneSettings
from lab.commands.show import headroom_words
from lab.layouts import LayoutError, LayoutSpace, cards_enough, cluster_toml, parsed
from lab.profile import Profile
from lab.search import HEADROOM_MAX
from launcher.cluster.file import parse
from launcher.cluster.plan import check
from runtime.settings.options import SettingsError
from tests.lab.profiles import GPU, scaled

DEGREES = 1, 2, 4


def split(cards: int) -> Profile:
    """A worker of so many cards, that computes nearly so many times as fast."""
    return scaled(GPU, cards**-0.8, cards**-0.8).replaced(about={"model": "m", "cards": cards})


def space(cards: int, *degrees: int) -> LayoutSpace:
    return LayoutSpace(cards, profiles={one: split(one) for one in degrees or DEGREES})


@pytest.mark.parametrize("text", ["2P@TP2+1D@TP4", "4M@TP2", "3P1D", "1P@TP8+1D@TP8"])
def test_layout_is_read_and_written(text: str) -> None:
    """A layout is shown as it can be given."""
    one = parsed(text.lower())
    assert str(one) == text or (text == "3P1D" and one.cards == (1, 1))
    assert parsed(str(one)) == one
    assert one.all_cards == {"2P@TP2+1D@TP4": 8, "4M@TP2": 8, "3P1D": 4, "1P@TP8+1D@TP8": 16}[text]


@pytest.mark.parametrize("text", ["2P@TP2", "1P1D+1M", "0M", "2M@TP0", "1M@TP16", "2X", "1P1P1D", "", "1P@2+1D"])
def test_wrong_layout_is_refused(text: str) -> None:
    """What is no layout is refused with an example of one."""
    with pytest.raises(LayoutError, match="has '"):
        parsed(text)


@pytest.mark.parametrize("cards", [2, 8, 12, 32])
def test_layouts_use_all_cards(cards: int) -> None:
    """Candidates use the budget or a part of it exactly, with at most one of each kind, and mixed workers among them."""
    found = space(cards).candidates()
    assert len(set(found)) == len(found) <= 170
    totals = {one.all_cards for one in found}
    assert max(totals) == cards and min(totals) >= cards // 4
    assert all(one.cards[0] == one.cards[1] for one in found if one.workers.mixed)
    assert {one.cards for one in found if one.all_cards == 8} >= ({(1, 4), (4, 2), (2, 2)} if cards == 8 else set())
    near = space(cards).around(next(one for one in found if one.cards == (1, 1) and one.workers.prefill))
    assert all(one.cards == (1, 1) and one.all_cards == cards for one in near)


def test_each_phase_has_its_own_times() -> None:
    """A layout of two degrees takes prefill from the one and decode, memory and cost from the other."""
    both = space(8)
    mine = both.profile_of(GPU, parsed("2P@TP2+1D@TP4"))
    assert (mine.prefill.curve, mine.decode.curve) == (split(2).prefill.curve, split(4).decode.curve)
    assert both.profile_of(GPU, parsed("2M@TP4")) == split(4)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("2P@TP2+1D@TP4", ["2P1D"]), ("3M@TP4", ["2M", "1M"]), ("2P@TP4+1D@TP8", ["0P1D", "2P0D"]), ("3P5D", ["3P5D"])],
)
def test_cluster_file_starts_the_layout(text: str, hosts: list[str]) -> None:
    """The file of a layout is a whole one, whose workers have the cards and the options of their degree."""
    one = parsed(text)
    file = parse("\n".join(cluster_toml(one, "org/name", split(1).replaced(step_tokens=0))), PurePath("/"))
    assert [str(host.workers) for host in file.hosts.values()] == hosts
    gpus = [own.split(",") for host in file.hosts.values() for own in host.gpus]
    assert sum(len(own) for own in gpus) == one.all_cards
    assert sorted(len(own) for own in gpus) == sorted(
        [one.cards[0]] * one.workers.prefill + [one.cards[1]] * (one.workers.decode + one.workers.mixed)
    )
    plans = check(file)
    assert len(plans) == len(hosts)


def test_separate_workers_need_one_context(tmp_path: Path) -> None:
    """Workers whose memory holds the longest request once are compared with separate phases, and not as mixed ones. The report
    says what is left out, and the workers of the answer are started with a context that their memory holds."""
    kv_tokens = worker_profile("H100-SXM", model_of("Llama-3.1-70B"), 2).prefill_capacity.kv_tokens
    longest = int(0.7 * kv_tokens)
    most = {"model": "Llama-3.1-70B", "rate": 0.5, "slo_ttft_ms": 6000.0, "slo_tpot_ms": 50.0}
    most["prompt_tokens"] = str(longest)
    found = report(tmp_path, **most, cards=4)
    names = {one["workers"] for one in found["by_workers"]}
    assert "1P@TP2+1D@TP2" in names and "2M@TP2" not in names
    assert any(line.startswith("Mixed workers of 2 cards are left out") for line in found["caveats"])
    found = report(tmp_path, **most, layouts=["1P@TP2+1D@TP4"])
    assert found["apply"]["cluster_toml"][0].startswith('model = "Llama-3.1-70B"  # write its folder, or its name on')
    [line] = [one for one in found["apply"]["cluster_toml"] if one.startswith("max_model_len")]
    assert longest < int(line.split()[-1]) <= kv_tokens
    assert "max_model_len" not in str(report(tmp_path, cards=4)["apply"])
    with pytest.raises(SettingsError, match="memory of 4M@TP2 is too small"):
        tune.run(TuneSettings(**ASKED | most | {"layouts": ["4M@TP2", "1M@TP4"]}))


def test_headroom_beyond_what_was_played() -> None:
    """Where the highest load that was played is kept, the limit is said to be at least that."""
    assert headroom_words(HEADROOM_MAX) == "up to at least 4 times the load"
    assert headroom_words(1.32) == "up to 1.3 times the load"
    assert headroom_words(0.0) == "at no load"


def test_cards_that_are_enough() -> None:
    """More cards are named in whole workers, in proportion to the load that is kept; none where no load is kept."""
    assert cards_enough(parsed("2M@TP4"), 0.7) == 12
    assert cards_enough(parsed("8M"), 0.5) == 16
    assert cards_enough(parsed("8M"), 0.0) == 0


ASKED: dict[str, Any] = {
    "gpu": "h100-sxm",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "rate": 4.0,
    "duration_s": 10.0,
    "slo_ttft_ms": 400.0,
    "slo_tpot_ms": 12.0,
}


def report(tmp_path: Path, **more: Any) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert tune.run(TuneSettings(**ASKED | more, out=str(out), html=str(tmp_path / "out.html"))) == 0
    return dict(json.loads(out.read_text()))


def test_named_layouts_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--layouts` plays these alone, and answers with one of them, its file, and the command that starts it."""
    names = ["1P@TP2+1D@TP2", "1M@TP4", "4M"]
    found = report(tmp_path, layouts=names)
    assert {one["workers"] for one in found["ranked"]} == set(names)
    assert found["recommendation"]["workers"] in names
    assert found["apply"]["cluster_toml"][0] == f'model = "{ASKED["model"]}"'
    parse("\n".join(found["apply"]["cluster_toml"]), PurePath("/"))
    shown = capsys.readouterr().out
    assert "crossdock up cluster.toml --host gpu0" in shown
    assert "docs/engines.md" in shown or found["recommendation"]["workers"] == "4M"
    with pytest.raises(SettingsError, match="only ratios can be run"):
        tune_check.run(TuneCheckSettings(recommendation=str(tmp_path / "out.json")))


def test_strict_targets_need_split_workers(tmp_path: Path) -> None:
    """With a TPOT below what one card can do, the answer splits workers over several cards."""
    found = report(tmp_path, cards=4, slo_tpot_ms=5.0)
    assert "@TP" in found["recommendation"]["workers"]
    assert found["recommendation"]["total"] <= 4


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"cards": 8, "gpu": ""}, "need --gpu and --model"),
        ({"layouts": ["4M@TP2"], "cards": 4}, "one takes 8 cards, and --cards has 4"),
        ({"layouts": ["4M@TP2+1P"]}, "--layouts: has "),
        ({"cards": 2, "model": "Llama-3.1-405B"}, "no room for KV"),
        ({"cards": 8, "model": "acme/Frob-9B"}, "neither a folder"),
        ({"layouts": ["4M@TP3"]}, "cannot be split over 3 cards"),
        ({}, "--gpu: say how many with --cards"),
        ({"gpu": "", "cost_per_hour": 3.0}, "--cost-per-hour: only with --cards"),
        ({"cards": 8, "decode_profile": "l40s.json"}, "not with --prefill-profile"),
    ],
)
def test_impossible_cards_are_refused(more: dict[str, Any], why: str) -> None:
    """What cannot be laid out is refused with the option and the reason."""
    with pytest.raises(SettingsError, match=why):
        tune.run(TuneSettings(**ASKED | more))
