"""GET routes: models, health, readiness. Metrics have a port of their own."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.http.errors import ApiError, model_not_found
from gateway.openai.context import Gateway, gateway_of

router = APIRouter()


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.rules.model_id,
        "object": "model",
        "created": gateway.created,
        "owned_by": "crossdock",
        "max_model_len": gateway.tokenizer.facts.context_tokens,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(gateway_of(request))]})


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> Response:
    gateway = gateway_of(request)
    if model_id != gateway.rules.model_id:
        raise model_not_found(model_id, gateway.rules.model_id)
    return JSONResponse(_model(gateway))


@router.get("/health")
async def health() -> Response:
    """200 while this process answers."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 only when a request would be served."""
    reason = gateway_of(request).backend.not_ready
    if reason is not None:
        raise ApiError(503, f"Not ready: {reason}.", code="not_ready", retry_after_s=1.0)
    return JSONResponse({"status": "ready"})
