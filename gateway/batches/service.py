"""The parts that routes and runner share: the store, and the bounds on its content."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from starlette.requests import Request

from gateway.batches.store import Store, StoreError
from gateway.http.errors import ApiError
from runtime.process import log

P = ParamSpec("P")
T = TypeVar("T")
DAY_S = 86_400
FILE_BYTES_MAX = 64 << 20


@dataclass
class BatchService:
    store: Store
    file_bytes_max: int
    tenant_bytes_max: int
    """Bytes of all files and results of one tenant, with what each file and batch counts beside."""
    keep_s: int
    wake: Callable[[], None] = lambda: None
    """Told when there is something new for the runner."""

    async def write(self, work: Callable[Concatenate[Any, P], T], *args: P.args, **kw: P.kwargs) -> T:
        """As `Store.write_soon`, for clients. Raises `ApiError`."""
        try:
            return await self.store.write_soon(work, *args, **kw)
        except StoreError as error:
            raise _failed(error) from None

    async def read(self, work: Callable[Concatenate[Any, P], T], *args: P.args, **kw: P.kwargs) -> T:
        """As `Store.read`, for clients. Raises `ApiError`."""
        try:
            return await self.store.read(work, *args, **kw)
        except StoreError as error:
            raise _failed(error) from None


def service_of(request: Request) -> BatchService:
    """Raises `ApiError` (404) where this gateway has none."""
    service = request.app.state.batches
    if not isinstance(service, BatchService):
        message = "This gateway keeps no files and batches: it was started without --batch-db."
        raise ApiError(404, message, code="batches_not_enabled")
    return service


def _failed(error: StoreError) -> ApiError:
    log.get("crossdock.batches").error("cannot use the file of batches", error=str(error))
    return ApiError(503, "The file of batches cannot be used.", code="batch_store_failed", retry_after_s=5.0)
