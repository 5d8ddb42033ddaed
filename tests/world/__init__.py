"""The fault world: the production cores in virtual time, with faults that a seed decides.

    result = run_seed(7)          result.failure is None, or what was broken; `timeline` tells what happened

Read `faults/plan` (what a seed stands for), `world` (time, processes, the log), `network` and `links` (connections and what
happens to them), `faults/coordinator_process`, `gateway_process` and `worker_processes` (the production cores, driven),
`transfers/` (KV hand-over), `toy_model` (a model of a few integers), `faults/cluster` (faults and healing), `faults/oracles`
and `audit` (what must hold), `run`. `planted*` are bugs that the world must find. docs/faults.md describes it.
"""
