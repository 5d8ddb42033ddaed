"""Why a model is not served."""

from proto.errors import BadOption


class ModelUnsupported(BadOption):
    """This model or these settings cannot be served."""

    option = "--model"


class WeightsUnsupported(ModelUnsupported):
    """The weights cannot be kept in this format."""

    option = "--weights"


class PoolTooSmall(ModelUnsupported):
    """The KV pool asked for holds next to nothing of this model."""

    option = "--kv-gib"
