"""`crossdock top`: what a frame shows, and the rates between two reports."""

import io

import msgspec
from rich.console import Console

from launcher.admin.top import Rates, frame
from proto.messages import Role
from proto.status import StatusReport, TenantStatus, WorkerStatus

PREFILL = WorkerStatus("prefill-0", Role.PREFILL, "tiny", "here", 6, 100, 10, 1, 2, 1_000)
DECODE = WorkerStatus("decode-0", Role.DECODE, "tiny", "here", 7, 100, 93, 12, 1, 500, draining=True)
REPORT = StatusReport(
    (PREFILL, DECODE), ("gateway-0",), 4, {"decoding": 12, "queued": 4}, {}, {},
    tenants=(TenantStatus("acme", 0.75, 3),), circuit_open=("prefill-0 → decode-0: 3 transfers failed in a row",),
    recent={"requests": 9.0, "ttft_p50_ms": 120.0, "ttft_p99_ms": 900.0},
)  # fmt: skip


def _shown(report: StatusReport, rates: Rates) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(frame(report, rates))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_frame_shows_load_and_tenants() -> None:
    """A frame shows each worker's load, KV and speed, the queue, tenants and what is left out."""
    rates = Rates()
    rates.see(REPORT, 10.0)
    later = msgspec.structs.replace(PREFILL, tokens_forwarded=1_600)
    restarted = msgspec.structs.replace(DECODE, pid=8, tokens_forwarded=20)
    rates.see(msgspec.structs.replace(REPORT, workers=(later, restarted)), 12.0)
    assert rates.per_s == {"prefill-0": 300.0}
    text = _shown(REPORT, rates)
    assert "4 queued   12 running   TTFT p50 120 ms, p99 900 ms" in text
    prefill, decode = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("pre", "dec"))
    assert prefill.split()[:4] == ["prefill-0", "prefill", "1", "2"] and prefill.rstrip().endswith("10%       300")
    assert "decode, draining" in decode and " 93%" in decode and decode.count("█") == 19
    assert "acme" in text and "75%" in text and "Left out: prefill-0 → decode-0" in text
