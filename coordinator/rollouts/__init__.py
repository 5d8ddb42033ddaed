"""Revisions of a model that serve side by side. `plan` has what `crossdock rollout` asks for, `revisions` the choice of a pool
for a request."""
