"""The parts that routes and runner share: the store, and the bounds on its content."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from gateway.batches.store import Store
from gateway.http.errors import ApiError

DAY_S = 86_400


@dataclass
class BatchService:
    store: Store
    file_bytes_max: int
    tenant_bytes_max: int  # Bytes of all files and results of one tenant, with what each file and batch counts beside
    keep_s: int
    wake: Callable[[], None] = lambda: None  # Told when there is something new for the runner


def service_of(request: Request) -> BatchService:
    """Raises `ApiError` (404) where this gateway has none."""
    service = request.app.state.batches
    if not isinstance(service, BatchService):
        message = "This gateway keeps no files and batches: it was started without --batch-db."
        raise ApiError(404, message, code="batches_not_enabled")
    return service
