"""The words of `crossdock doctor` for each cause: the fault, and what helps. `{where}` is a worker, tenant or class."""

from typing import Final

CAUSES: Final = {
    "failing_worker": (
        "{where} fails, and is left out",
        "read its log (crossdock logs {where}); crossdock drain {where}, and replace it",
    ),
    "restarting_process": ("{where} does not stay up", "read its log: crossdock logs {where}"),
    "no_worker": (
        "no {where} worker is connected",
        "start one; its log says why it does not register (--coordinator, --keys)",
    ),
    "broken_pair": (
        "KV does not get from one worker to the other: {where}",
        "check the network between the two hosts; --transfer-host names the interface, --kv-transport another transport",
    ),
    "throttled_cpu": (
        "a CPU limit stops {where}",
        "raise the limit: resources.limits.cpu of the pod, --cpus of the container, or CPUQuota= of the unit",
    ),
    "few_descriptors": (
        "{where} may open few file descriptors; each stream and each peer takes one",
        "raise the hard limit: LimitNOFILE= of the systemd unit, --ulimit nofile= of the container, or ulimit -Hn",
    ),
    "clock_skew": (
        "the wall clock of {where} is wrong, or that of this machine",
        "run chrony or another NTP client on every host: daily quotas, batches and logs go by wall clocks",
    ),
    "slow_worker": (
        "{where} computes slower than others of its role",
        "look for other work on its host, its clock rates and --cpu-cores; crossdock drain {where} takes it out of service",
    ),
    "full_kv": (
        "the KV caches of the {where} workers are full",
        "give these workers more KV memory (--kv-gib, on a GPU --gpu-memory-share), add workers, or ask for smaller max_tokens",
    ),
    "wrong_ratio": (
        "the ratio of workers does not suit this traffic: {where}",
        "crossdock flip changes a worker's role, --autopilot on does it by itself; crossdock tune finds the best ratio",
    ),
    "cold_cache": (
        "prefix caches are cold after a start of {where}",
        "nothing: they fill again. Before the next restart, crossdock drain the workers one after the other",
    ),
    "lost_sessions": (
        "KV of sessions is given up before their next turn",
        "give workers more KV memory (--kv-gib), or prefill workers a second tier (--kv-tier-gib)",
    ),
    "hot_tenant": (
        "{where} sends more than its share",
        "in the tenants file, limit {where} (requests_per_min, concurrency), or lower its weight",
    ),
    "small_quota": (
        "{where} is refused while the cluster has room",
        "in the tenants file, raise the limit for {where} or its organisation, or set borrow = true",
    ),
    "impossible_target": (
        "the tpot_ms of priority class {where} is below what this hardware does",
        "in the tenants file, raise tpot_ms of [priority_classes.{where}], or use faster decode workers",
    ),
    "vllm_full_kv": (
        "the KV cache of {where} is full",
        "raise --gpu-memory-utilization, lower --max-num-seqs or --max-model-len, or add servers",
    ),
    "vllm_full_batch": (
        "requests wait at {where}, and its KV cache has room",
        "raise --max-num-seqs if time per token allows it, --max-num-batched-tokens for long prompts, or add servers",
    ),
    "vllm_cold_cache": (
        "prompts find less in the prefix cache of {where} than before",
        "route the turns of a conversation to one server, or give it more KV memory",
    ),
}
