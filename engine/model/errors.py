"""Why a model is not served."""

from proto.errors import BadOption


class ModelUnsupported(BadOption):
    option = "--model"


class WeightsUnsupported(ModelUnsupported):
    """The weights cannot be kept in this format."""

    option = "--weights"


class GpuUnsupported(ModelUnsupported):
    option = "--device"


class NoMemory(ModelUnsupported):
    """The weights alone are more than the device has room for."""


class ContextUnsupported(ModelUnsupported):
    """The context asked for is longer than the model's, or next to nothing."""

    option = "--max-model-len"


class PoolTooSmall(ModelUnsupported):
    """The KV pool asked for holds next to nothing of this model."""

    option = "--kv-gib"
