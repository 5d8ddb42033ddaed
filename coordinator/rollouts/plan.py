"""Rollouts: which revisions of a model get new requests, and what the requests of `crossdock rollout` change. Pure."""

from collections.abc import Mapping, Sequence

import msgspec
from xxhash import xxh64_intdigest

from coordinator.accounting.billing import whole_of
from proto.errors import CrossdockError
from proto.messages import Submit
from proto.policy import RevisionStatus, RolloutAction, RolloutRequest


class RolloutError(CrossdockError):
    """A request of `crossdock rollout` that cannot be met."""


class Rollout(msgspec.Struct, frozen=True):
    """The revisions of one model that get new requests."""

    revision: str  # in force: it gets all but those of the trial
    trial: str | None = None
    share: float = 0.0
    by_organisation: bool = False
    organisations: tuple[str, ...] = ()

    def tries(self, submit: Submit) -> bool:
        """Whether a new request goes to the revision on trial. All turns of a session with a name go to the same one."""
        if self.trial is None:
            return False
        organisation = submit.tenant.partition("/")[0]
        by_request = submit.session or (whole_of(submit) or submit.request_id).encode()
        what = organisation.encode() if self.by_organisation else by_request
        drawn = xxh64_intdigest(self.trial.encode() + b"/" + what)  # a larger share has all of a smaller one
        return organisation in self.organisations or drawn < self.share * 2**64


Rollouts = Mapping[str, Rollout]  # by model id


def apply(rollouts: Rollouts, asked: RolloutRequest, there: Sequence[RevisionStatus]) -> dict[str, Rollout]:
    """Returns the rollouts after a request. `there`: the revisions that have workers. Raises `RolloutError`."""
    model = asked.model or _only(asked, rollouts, there)
    known = {one.revision: one for one in there if one.model == model}
    now = rollouts.get(model) or Rollout(next((one.revision for one in known.values() if one.in_force), ""))
    if asked.action is RolloutAction.START:
        new = known.get(asked.revision)
        if new is None or not (new.prefill and new.decode):
            names = ", ".join(map(repr, known)) or "none"
            raise RolloutError(
                f"revision {asked.revision!r} of {model} needs a prefill and a decode worker that take work; start workers with"
                f" --revision {asked.revision or 'REVISION'} first (revisions with workers: {names})"
            )
        if asked.revision == now.revision:
            raise RolloutError(f"revision {asked.revision!r} of {model} is in force already")
        if now.trial not in (None, asked.revision):
            raise RolloutError(f"revision {now.trial!r} of {model} is on trial; promote or abort it first")
        if not asked.share and not asked.organisations:
            raise RolloutError("a rollout needs a share or organisations")
        after = Rollout(now.revision, asked.revision, asked.share, asked.by_organisation, asked.organisations)
    elif now.trial is None:
        raise RolloutError(f"no revision of {model} is on trial; begin with crossdock rollout start")
    else:
        after = Rollout(now.trial if asked.action is RolloutAction.PROMOTE else now.revision)
    return {**rollouts, model: after}


def _only(asked: RolloutRequest, rollouts: Rollouts, there: Sequence[RevisionStatus]) -> str:
    if asked.action is RolloutAction.START:
        models = {one.model for one in there if one.revision == asked.revision} or {one.model for one in there}
    else:
        models = {model for model, rollout in rollouts.items() if rollout.trial is not None}
    if len(models) > 1:
        raise RolloutError(f"several models have that: {', '.join(sorted(models))}; name one with --model-id")
    if not models:
        raise RolloutError("no revision is on trial; begin with crossdock rollout start")
    return models.pop()
