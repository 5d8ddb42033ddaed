"""Routes without a body: models, version, health, readiness, metrics."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from gateway.http.errors import ApiError
from gateway.openai.answer_types import EndedSession, Model, ModelList, Ready, Status, Version
from gateway.openai.context import Gateway, ServedModel
from gateway.openai.dependencies import GatewayDep, TenantDep
from gateway.openai.openapi import refusals
from gateway.text.block_hashes import session_name
from runtime.process.version import version_of

router = APIRouter(tags=["Models and state"])


def _model(gateway: Gateway, served: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "crossdock",
        "root": served.rules.model_id,
        "max_model_len": served.tokenizer.facts.context_tokens,
        # Anthropic's clients read these.
        "max_input_tokens": served.tokenizer.facts.prompt_tokens_max,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(gateway.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models", summary="The models served here.", response_model=ModelList, responses=refusals(401))
async def models(gateway: GatewayDep, _tenant: TenantDep) -> dict[str, Any]:
    found = [_model(gateway, served, name) for served in gateway.models for name in served.rules.names]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return {"object": "list", "data": found, "has_more": False, **ends}


@router.get("/v1/models/{model_id:path}", summary="One model.", response_model=Model, responses=refusals(401, 404))
async def model(gateway: GatewayDep, _tenant: TenantDep, model_id: str) -> dict[str, Any]:
    return _model(gateway, gateway.model(model_id), model_id)


@router.delete(
    "/v1/sessions/{session_id:path}",
    summary="End a conversation.",
    response_model=EndedSession,
    responses=refusals(401, 503),
)
async def end_session(gateway: GatewayDep, tenant: TenantDep, session_id: str) -> dict[str, Any]:
    """Caches give up the blocks that only this conversation has; turns that run go on. To end one that is not known does no
    harm."""
    if not gateway.backend.end_session(tenant, session_name(session_id)):
        raise ApiError(
            503, "The coordinator cannot be reached: nothing was ended.", code="not_ready", retry_after_s=1.0
        )
    return {"id": session_id, "object": "session", "deleted": True}


@router.get(
    "/metrics",
    summary="This gateway's metrics, for Prometheus; the other processes have ports of their own.",
    response_class=PlainTextResponse,
    responses=refusals(401, 404),
)
async def metrics(gateway: GatewayDep, _tenant: TenantDep) -> Response:
    """Not where there are several tenants: any tenant's key would show the names and traffic of all."""
    if gateway.metrics_page is None or len(gateway.keys.tenants.policies) > 1:
        message = "There are no metrics here: they have a port of their own, which `crossdock status` shows."
        raise ApiError(404, message, code="not_found")
    status, body, content_type = gateway.metrics_page()
    return Response(body, status, media_type=content_type)


@router.get("/version", summary="The version of this server.", response_model=Version)
async def version() -> dict[str, str]:
    return {"version": version_of()}


@router.get("/", summary="As /health, for probes that ask for nothing else.", response_model=Status)
@router.get("/health", summary="200 while this process answers.", response_model=Status)
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get(
    "/ready",
    summary="200 only while a request would be served.",
    response_model=Ready,
    response_model_exclude_none=True,
    responses=refusals(503),
)
async def ready(gateway: GatewayDep) -> dict[str, Any]:
    reason = gateway.backend.not_ready
    if reason is not None:
        raise ApiError(503, f"Not ready: {reason}.", code="not_ready", retry_after_s=1.0)
    warnings = [warning for served in gateway.models for warning in served.warnings]
    return {"status": "ready", **({"warnings": warnings} if warnings else {})}
