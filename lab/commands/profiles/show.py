"""A profile on the terminal."""

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console

from lab.profile import Profile, TransferCost
from launcher import tables

SCATTER_MAX: Final = 0.3  # on a quiet machine, 9 in 10 steps exceed the fit by less than this share
NO_LIMIT: Final = TransferCost().bytes_per_ms  # long transfers take no longer than short ones
RUNS: Final = {
    "calibrated": "From one start of the workers to the next, times differ by {}",
    "estimated": "An estimate, {}",
    "from a server": "From one run to the next, times may differ by {}",
}


def error_words(about: Mapping[str, Any], profile: Profile) -> str:
    """Returns how far the times of one of the profile's sources may be off."""
    if about.get("origin", profile.origin) != "estimated":
        return f"{profile.run_sigma:.0%}"
    if "error" in about:
        mean, most = about["error"]
        return f"from data sheets; steps of such a worker are off by {mean:.0%} on average and {most:.0%} at most"
    return f"from {about['source']}" if "source" in about else "from data sheets; times may be off by a quarter"


def show(profile: Profile, console: Console) -> None:
    table = tables.Table("What steps take", "phase", "count", "ms")
    phases = ("prefill tokens", profile.prefill), ("decode sequences", profile.decode)
    for name, cost in phases:
        for at, ms in zip(cost.curve.at, cost.curve.ms, strict=True):
            table.row(name, f"{at:.0f}", f"{ms:.2f}")
    table.show(console)
    host, transfer = profile.host, profile.transfer
    speed = f" + {transfer.bytes_per_token / 1024:.0f} KiB a token at {transfer.bytes_per_ms / 1e6:.2f} GB/s"
    if transfer.bytes_per_ms >= NO_LIMIT:
        speed = " after the last step, however long the prompt"
    lines = []
    if any(cost.residuals.p90 for _, cost in phases):
        lines.append(
            "8 in 10 steps took, beside these figures: "
            + ", ".join(
                f"{name.split()[0]} {cost.residuals.p10:+.0%} to {cost.residuals.p90:+.0%}" for name, cost in phases
            )
        )
    lines += [
        f"Context: {1e6 * profile.prefill.context_ms:.2f} ns for each pair of tokens in prefill,"
        f" {1e6 * profile.decode.kv_token_ms:.0f} ns for each token of KV in a decode step",
        f"KV transfer: {transfer.latency_ms:.2f} ms{speed}",
        f"Host: {host.request_ms:.1f} ms a request + {1000 * host.request_token_ms:.1f} µs a prompt token,"
        f" {host.step_gap_ms:.2f} ms between steps, {host.join_ms:.2f} ms to join a batch",
    ]
    if profile.control.step_ms:
        lines.append(
            f"Tokens on the cores of gateway and client: {profile.control.step_ms:.2f} ms a decode step"
            f" + {1000 * profile.control.token_ms:.0f} µs a token"
        )
    lines.append(RUNS[profile.origin].format(error_words(profile.about, profile)))
    if max(profile.beside_decode, profile.beside_prefill) > 1.01:
        lines.append(
            f"Both roles on this host: prefill takes {profile.beside_decode:.2f} times as long beside decode,"
            f" decode {profile.beside_prefill:.2f} times beside prefill"
        )
    if profile.beside_mixed > 1.01:
        lines.append(
            f"Mixed workers on this host: decode takes {profile.beside_mixed:.2f} times as long beside another's"
        )
    for line in lines:
        console.print(line, highlight=False)
    if max(cost.residuals.p90 for _, cost in phases) > SCATTER_MAX:
        console.print(
            "[yellow]The times differ much: was the machine busy with something else? Calibrate again[/yellow]"
        )
