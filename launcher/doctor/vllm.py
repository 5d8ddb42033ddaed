"""The rules of `crossdock doctor --url` for a plain vLLM server: what its metrics allow. Pure."""

from collections.abc import Iterator
from typing import Final

from launcher.doctor.rules import CACHED_SHARE_MIN, PROMPT_TOKENS_MIN, Finding
from launcher.doctor.snapshot import ProcessMetrics

KV_FULL: Final = 0.9


def diagnose(server: ProcessMetrics) -> Iterator[Finding]:
    waiting, running = server.now("vllm:num_requests_waiting"), server.now("vllm:num_requests_running")
    kv_used = max((one.now for one in server.readings("vllm:kv_cache_usage_perc")), default=0.0)
    preempted = server.grew("vllm:num_preemptions_total")
    evidence = (
        f"{kv_used:.0%} of the KV cache is in use",
        f"{preempted:.0f} requests were preempted",
        f"{running:.0f} run and {waiting:.0f} wait",
    )
    if preempted or (waiting and kv_used >= KV_FULL):
        yield Finding("vllm_full_kv", server.name, "certain", evidence)
    elif waiting > running:
        yield Finding("vllm_full_batch", server.name, "likely", evidence)
    asked, hit = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    new, old = server.grew(asked), server.now(asked) - server.grew(asked)
    share, before = server.grew(hit) / max(new, 1.0), (server.now(hit) - server.grew(hit)) / max(old, 1.0)
    if min(new, old) >= PROMPT_TOKENS_MIN and before >= CACHED_SHARE_MIN and share <= before / 2:
        said = f"{share:.0%} of prompt tokens were cached, {before:.0%} before"
        yield Finding("vllm_cold_cache", server.name, "possible", (said,))
