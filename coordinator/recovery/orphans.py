"""Requests whose gateway is gone end, a number of them with each event: there may be a hundred thousand."""

from collections.abc import Iterator

from coordinator.state import State
from proto.errors import CancelReason
from proto.messages import Hello
from scheduler.lifecycle import TERMINAL, Trigger
from scheduler.request import Request


def gateway_lost(state: State, incarnation: int, hello: Hello) -> None:
    requests = [request for request in state.cluster.requests.values() if request.gateway_incarnation == incarnation]
    state.orphans.update((request.id, request) for request in requests)
    state.lost_gateways[incarnation] = hello
    state.spread.begin(incarnation, _end_all(state, incarnation, requests))


def _end_all(state: State, incarnation: int, requests: list[Request]) -> Iterator[None]:
    for request in requests:
        end(state, request.id)
        yield
    del state.lost_gateways[incarnation]


def end(state: State, request_id: str) -> None:
    """End a request if its gateway is gone."""
    request = state.orphans.pop(request_id, None)
    if request is not None and request.state not in TERMINAL:
        state.billing.doubt(request_id, state.now)
        state.end(request, Trigger.CANCEL, CancelReason.GATEWAY_LOST, state.now)
