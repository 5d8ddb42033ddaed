"""A cluster's processes as `crossdock serve` would start them, which do not start."""

from pathlib import Path

from launcher.local import cluster as clusters
from launcher.local.ports import ReservedPorts
from launcher.models.resolve import ReadyModel
from runtime.settings.serve import ServeSettings

MODEL = ReadyModel(Path("/models/tiny"), "tiny")


def build(settings: ServeSettings) -> clusters.LocalAddresses:
    with ReservedPorts() as ports:
        return clusters.build(settings, MODEL, ports)
