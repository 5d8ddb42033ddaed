"""`crossdock tune --cards`: the profile of each degree of tensor parallelism, and the layouts that these cards allow."""

from collections.abc import Mapping, Sequence

from lab.commands.profiles.estimate import model_of, notes, worker_profile
from lab.commands.settings import TuneSettings
from lab.layouts import HOST_CARDS, LayoutError, LayoutSpace, parsed
from lab.play.request import Sent
from lab.profile import Profile
from lab.search import Candidate, Space
from runtime.settings.options import SettingsError

DEGREES = tuple(1 << power for power in range(HOST_CARDS.bit_length()))


def is_asked(settings: TuneSettings) -> bool:
    """Raises `SettingsError` if options of both kinds of question are given, of which one would have no effect."""
    asked = bool(settings.cards or settings.layouts)
    if asked and (settings.prefill_profile or settings.decode_profile):
        raise SettingsError(
            "--cards and --layouts: not with --prefill-profile and --decode-profile; they take one --gpu"
        )
    if not asked and settings.gpu:
        raise SettingsError("--gpu: say how many with --cards, or name layouts with --layouts")
    if not asked and settings.cost_per_hour:
        raise SettingsError("--cost-per-hour: only with --cards or --layouts; a profile has the cost of its own worker")
    return asked


def budget_of(settings: TuneSettings) -> int:
    """Raises `SettingsError`."""
    most = max((one.all_cards for one in _named(settings)), default=settings.cards)
    if settings.cards and most > settings.cards:
        raise SettingsError(f"--layouts: one takes {most} cards, and --cards has {settings.cards}")
    return settings.cards or most


def profiles_of(settings: TuneSettings) -> dict[int, Profile]:
    """Returns a profile for each degree of tensor parallelism for which the model fits the cards. Raises `SettingsError`."""
    if not settings.gpu or not settings.model:
        raise SettingsError("--cards and --layouts: need --gpu and --model, of which the step times are estimated")
    model, most = model_of(settings.model), budget_of(settings)
    named = {degree for one in _named(settings) for degree in one.cards}
    degrees = sorted(named) or [degree for degree in DEGREES if degree <= most]
    if model.shape:
        degrees = [degree for degree in degrees if model.shape.heads % degree == 0]
    found, problem = {}, f"--layouts: the model's heads cannot be split over {max(named, default=1)} cards"
    for degree in degrees:
        try:
            found[degree] = worker_profile(settings.gpu, model, degree, cost_per_hour=degree * settings.cost_per_hour)
        except SettingsError as error:
            problem = str(error)
    if not found or named - found.keys():
        raise SettingsError(problem)
    return found


def widest(profiles: Mapping[int, Profile]) -> Profile:
    return max(profiles.values(), key=lambda one: one.prefill_capacity.context_tokens)


def space_of(
    settings: TuneSettings, space: Space, profiles: Mapping[int, Profile], sent: Sequence[Sent]
) -> LayoutSpace:
    """Returns the layouts whose workers have memory for each request, mixed ones twice. Raises `SettingsError`."""
    longest = longest_of(sent)
    fit = {degree: one for degree, one in profiles.items() if one.prefill_capacity.kv_tokens >= longest}
    twice = frozenset(degree for degree, one in fit.items() if one.prefill_capacity.context_tokens >= longest)
    named = _named(settings)
    for one in named:
        if not set(one.cards) <= (twice if one.workers.mixed else fit.keys()):
            raise SettingsError(f"--layouts: the memory of {one} is too small for requests of {longest:,} tokens")
    found = LayoutSpace(
        space.budget, space.mixed, space.step_tokens, space.seqs_max, profiles=fit, named=named, twice=twice
    )
    if not found.candidates():
        raise SettingsError(
            f"--cards: no layout of {space.budget} cards has a worker for each phase; the model needs {min(fit)} for a worker"
        )
    return found


def longest_of(sent: Sequence[Sent]) -> int:
    """Returns the tokens of the longest request, prompt and answer."""
    return max(one.prompt_tokens + one.output_tokens for one in sent)


def caveats(settings: TuneSettings, kinds: Mapping[int, Profile], sent: Sequence[Sent], profile: Profile) -> list[str]:
    if not kinds:
        return []
    about = profile.about.get("decode", profile.about)
    longest, found = longest_of(sent), notes(about)
    for degree, one in sorted(kinds.items()) if not settings.layouts else ():
        capacity = one.prefill_capacity
        if capacity.context_tokens < longest:
            what = "Mixed workers" if capacity.kv_tokens >= longest else "Workers"
            found.append(
                f"{what} of {degree} card{'s' * (degree > 1)} are left out: the longest request has {longest:,} tokens, and"
                f" their memory is for {capacity.kv_tokens:,}{', shared by both phases' * what.startswith('Mixed')}."
            )
    return found


def _named(settings: TuneSettings) -> tuple[Candidate, ...]:
    try:
        return tuple(parsed(text) for text in settings.layouts)
    except LayoutError as error:
        raise SettingsError(f"--layouts: {error}") from None
