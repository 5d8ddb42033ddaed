"""`crossdock profile estimate`: a profile from published figures of a card and the shape of a model."""

import codecs
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from launcher import reports
from launcher.tuning.profiles.settings import EstimateSettings
from launcher.tuning.profiles.show import show
from runtime.process.version import version_of
from runtime.settings.options import SettingsError
from tuning.estimates.cards import CARDS
from tuning.estimates.roofline import EstimateError, estimated
from tuning.estimates.shapes import KNOWN, Shape, ShapeError, of_config
from tuning.profile import encoded

CONFIG_BYTES_MAX = 1 << 20
STEP_TOKENS = 2048  # of a prefill step; crossdock tune can compare others
SEQS_MAX = 64  # of a decode batch, likewise


def run(settings: EstimateSettings) -> int:
    reports.check_writable(settings.out, "--out")
    console = reports.console_for(settings)
    shape = shape_of(settings.model)
    about = {
        "model": settings.model,
        "device": "cuda",
        "cards": settings.tensor_parallel,
        "machine": {"cpu": f"{settings.tensor_parallel} x {settings.gpu}"},
        "parameters": shape.parameters,
        "versions": {"crossdock": version_of("crossdock")},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        profile = estimated(
            CARDS[settings.gpu],
            shape,
            settings.tensor_parallel,
            network_gbit_per_s=settings.network_gbit_per_s,
            step_tokens=STEP_TOKENS,
            seqs_max=SEQS_MAX,
            cost_per_hour=settings.cost_per_hour,
            about=about,
        )
    except EstimateError as error:
        raise SettingsError(f"--gpu {settings.gpu}: {error}") from None
    Path(settings.out).expanduser().write_bytes(encoded(profile))
    show(profile, console)
    console.print(f"Written: {settings.out}", highlight=False, soft_wrap=True)
    reports.write_json(settings, msgspec.to_builtins(profile))
    return 0


def shape_of(model: str) -> Shape:
    """Returns the shape of a model: from config.json in this folder, or of a model known by name. The organisation and further
    words of the name may be missing, as in `meta-llama/Llama-3.1-8B-Instruct`. Raises `SettingsError`."""
    file = Path(model).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if file.is_file():
        return _read(file)
    asked = model.rpartition("/")[2].lower()
    names = [name for name in KNOWN if asked == name.lower() or asked.startswith(f"{name.lower()}-")]
    if not names:
        raise SettingsError(
            f"--model: {model} is neither a folder with a config.json nor one of {', '.join(KNOWN)};"
            " a model's config.json is on its page on the hub"
        )
    return KNOWN[max(names, key=len)]


def _read(file: Path) -> Shape:
    try:
        if file.stat().st_size > CONFIG_BYTES_MAX:
            raise SettingsError(f"--model: {file} is larger than {CONFIG_BYTES_MAX} bytes")
        return of_config(msgspec.json.decode(file.read_bytes().removeprefix(codecs.BOM_UTF8), type=dict))
    except OSError as error:
        raise SettingsError(f"--model: {file}: {error.strerror}") from None
    except (msgspec.DecodeError, ShapeError) as error:
        raise SettingsError(f"--model: {file}: {error}") from None
