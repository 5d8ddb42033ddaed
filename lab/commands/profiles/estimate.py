"""`crossdock profile estimate`: a profile from measured tables of operators, or else from published figures of a card and the
shape of a model."""

import codecs
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lab.commands.profiles import tables
from lab.commands.profiles.settings import EstimateSettings, EstimateSource
from lab.commands.profiles.show import show
from lab.commands.profiles.tables import MeasuredTables
from lab.estimates.cards import CARDS
from lab.estimates.roofline import ERRORS, EstimateError, Roofline, StepTimes, estimated
from lab.estimates.shapes import KNOWN, Shape, ShapeError, of_config
from lab.profile import Profile, encoded
from launcher import reports
from runtime.process.version import version_of
from runtime.settings.options import SettingsError

CONFIG_BYTES_MAX: Final = 1 << 20
STEP_TOKENS: Final = 2048  # of a prefill step; crossdock tune can compare others
SEQS_MAX: Final = 64  # of a decode batch, likewise
FAR_OFF: Final = 2.0  # tables whose step takes so many times as long as the formula's, or the reverse, are worth a word


class Model(NamedTuple):
    name: str
    shape: Shape | None  # None: the formula does not know it, because of `fault`
    fault: str
    in_tables: str | Shape  # as `MeasuredTables` takes it


def run(settings: EstimateSettings) -> int:
    reports.check_writable(settings.out, "--out")
    console = reports.console_for(settings)
    profile = worker_profile(
        settings.gpu,
        model_of(settings.model),
        settings.tensor_parallel,
        source=settings.source,
        backend=settings.backend,
        network_gbit_per_s=settings.network_gbit_per_s,
        cost_per_hour=settings.cost_per_hour,
    )
    reports.write(settings.out, encoded(profile))
    show(profile, console)
    for line in notes(profile.about):
        console.print(f"[yellow]{line}[/yellow]", highlight=False, soft_wrap=True)
    console.print(f"Written: {settings.out}", highlight=False, soft_wrap=True)
    reports.write_json(settings, msgspec.to_builtins(profile))
    return 0


def worker_profile(
    gpu: str,
    model: Model,
    cards: int,
    *,
    source: EstimateSource = "auto",
    backend: str = "vllm",
    network_gbit_per_s: float = 200.0,
    cost_per_hour: float = 0.0,
) -> Profile:
    """Returns the profile of a worker of so many cards, from the tables where they have its operators. Raises
    `SettingsError`."""
    times, about = _times(gpu, model, cards, source, backend)
    about |= {
        "model": model.name,
        "device": "cuda",
        "cards": cards,
        "machine": {"cpu": f"{cards} x {gpu}"},
        "versions": {"crossdock": version_of("crossdock")},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        return estimated(
            times,
            network_gbit_per_s=network_gbit_per_s,
            step_tokens=STEP_TOKENS,
            seqs_max=SEQS_MAX,
            cost_per_hour=cost_per_hour,
            about=about,
        )
    except EstimateError as error:
        raise SettingsError(f"--gpu {gpu}: {error}") from None


def _times(
    gpu: str, model: Model, cards: int, source: EstimateSource, backend: str
) -> tuple[StepTimes, dict[str, Any]]:
    """Raises `SettingsError`."""
    card, lacking = CARDS[gpu], ""
    if source == "tables" and not tables.are_installed():
        raise SettingsError(f"--source tables: {tables.PACKAGE} is not installed; {reports.installs(tables.PACKAGE)}")
    formula = Roofline(card, model.shape, cards) if model.shape else None
    if source != "formula" and tables.are_installed():
        try:
            found = MeasuredTables(card, model.in_tables, cards, backend, step_tokens=STEP_TOKENS, seqs_max=SEQS_MAX)
        except EstimateError as error:
            lacking = str(error)
        else:
            about = found.about()
            if formula:
                about["times_the_formula"] = round(found.decode_ms(1) / formula.decode_ms(1), 2)
            return found, about
    if formula is None or source == "tables":
        raise SettingsError(f"--model: {model.name} on {gpu}: {lacking or model.fault}")
    about = {"source": "formula", "error": ERRORS[min((one for one in ERRORS if one >= cards), default=max(ERRORS))]}
    return formula, about | ({"no_tables": lacking} if lacking else {})


def notes(about: dict[str, Any]) -> list[str]:
    """Returns what a reader of the estimate should know about its source."""
    if about["source"] != "formula":
        times = about.get("times_the_formula", 1.0)
        if 1 / FAR_OFF <= times <= FAR_OFF:
            return []
        return [
            f"A decode step of one sequence takes {times:g} times as long as data sheets say; compare with another --backend"
        ]
    if "no_tables" in about:
        return [f"By formula, because the measured tables do not have it: {about['no_tables']}"]
    if tables.are_installed():
        return []
    return [f"By formula. For times of measured operators, {reports.installs(tables.PACKAGE)}"]


def model_of(model: str) -> Model:
    """Returns the shape of a model: from config.json in this folder, of a model whose config.json comes with the tables, or of
    one known by name. The organisation and further words of the name may be missing, as in `meta-llama/Llama-3.1-8B-Instruct`.
    Raises `SettingsError`."""
    file = Path(model).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if file.is_file():
        return _read(model, file)
    if found := tables.bundled(model):
        try:
            return Model(model, of_config(found[1]), "", found[0])
        except ShapeError as error:
            return Model(model, None, str(error), found[0])
    shape = _known(model)
    return Model(model, shape, "", shape)


def shape_of(model: str) -> Shape:
    """Raises `SettingsError`."""
    found = model_of(model)
    if found.shape is None:
        raise SettingsError(f"--model: {model}: {found.fault}")
    return found.shape


def _known(model: str) -> Shape:
    asked = model.rpartition("/")[2].lower().removeprefix("meta-")
    names = [name for name in KNOWN if asked == name.lower() or asked.startswith(f"{name.lower()}-")]
    if not names:
        raise SettingsError(
            f"--model: {model} is neither a folder with a config.json nor one of {', '.join(KNOWN)};"
            " a model's config.json is on its page on the hub"
        )
    shape = KNOWN[max(names, key=len)]
    return replace(shape, weight_bytes=1.0) if "fp8" in asked else shape


def _read(model: str, file: Path) -> Model:
    try:
        if file.stat().st_size > CONFIG_BYTES_MAX:
            raise SettingsError(f"--model: {file} is larger than {CONFIG_BYTES_MAX} bytes")
        config = msgspec.json.decode(file.read_bytes().removeprefix(codecs.BOM_UTF8), type=dict[str, Any])
    except OSError as error:
        raise SettingsError(f"--model: {file}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise SettingsError(f"--model: {file}: {error}") from None
    try:
        return Model(model, of_config(config), "", str(file.parent))
    except ShapeError as error:
        if not tables.are_installed():
            raise SettingsError(f"--model: {file}: {error}") from None
        return Model(model, None, str(error), str(file.parent))
