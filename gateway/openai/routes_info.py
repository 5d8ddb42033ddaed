"""Routes without a body: models, version, health, readiness, metrics, and the API's description."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from starlette.responses import Response

from gateway.http.encoding import JsonResponse
from gateway.http.errors import ApiError
from gateway.openai.call import Call, route
from gateway.openai.context import Gateway, ServedModel
from gateway.text.block_hashes import session_name
from runtime.process.version import version_of

_OPENAPI: Final = Path(__file__).with_name("openapi.json").read_bytes()  # Made by `python -m tools.openapi`


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


async def models(call: Call) -> Response:
    found = [_model(call.gateway, served, name) for served in call.gateway.models for name in served.rules.names]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return JsonResponse({"object": "list", "data": found, "has_more": False, **ends})


async def model(call: Call) -> Response:
    model_id = call.request.path_params["model_id"]
    return JsonResponse(_model(call.gateway, call.gateway.model(model_id), model_id))


async def end_session(call: Call) -> Response:
    """Caches give up the blocks that only this conversation has; turns that run go on. To end one that is not known does no
    harm."""
    session_id = call.request.path_params["session_id"]
    if not call.gateway.backend.end_session(call.tenant, session_name(session_id)):
        raise ApiError(
            503, "The coordinator cannot be reached: nothing was ended.", code="not_ready", retry_after_s=1.0
        )
    return JsonResponse({"id": session_id, "object": "session", "deleted": True})


async def metrics(call: Call) -> Response:
    """Not where there are several tenants: any tenant's key would show the names and traffic of all."""
    gateway = call.gateway
    if gateway.metrics_page is None or len(gateway.keys.tenants.policies) > 1:
        message = "There are no metrics here: they have a port of their own, which `crossdock status` shows."
        raise ApiError(404, message, code="not_found")
    status, body, content_type = gateway.metrics_page()
    return Response(body, status, media_type=content_type)


async def version(_: Call) -> Response:
    return JsonResponse({"version": version_of()})


async def health(_: Call) -> Response:
    return JsonResponse({"status": "ok"})


async def ready(call: Call) -> Response:
    reason = call.gateway.backend.not_ready
    if reason is not None:
        raise ApiError(503, f"Not ready: {reason}.", code="not_ready", retry_after_s=1.0)
    warnings = [warning for served in call.gateway.models for warning in served.warnings]
    return JsonResponse({"status": "ready", **({"warnings": warnings} if warnings else {})})


async def openapi(_: Call) -> Response:
    return Response(_OPENAPI, media_type="application/json")


ROUTES: Final = (
    route("GET", "/v1/models/", models),
    route("GET", "/v1/models", models),
    route("GET", "/v1/models/{model_id:path}", model),
    route("DELETE", "/v1/sessions/{session_id:path}", end_session),
    route("GET", "/metrics", metrics),
    route("GET", "/version", version, needs_key=False),
    route("GET", "/", health, needs_key=False),
    route("GET", "/health", health, needs_key=False),
    route("GET", "/ready", ready, needs_key=False),
    route("GET", "/openapi.json", openapi, needs_key=False),
)
