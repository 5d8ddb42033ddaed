"""Runs the production cores in virtual time: with faults that a seed decides, and under load (`simulation.cluster`).

    result = run.run(seed)          result.failure is None, or what was broken; run.story tells it

Read `faults` in this order: `plan` (what a seed stands for), `world` (time, processes, the log), `network` and `links`
(connections and what happens to them), `coordinator_process`, `gateway_process`, `worker_processes` (the production cores,
driven), `transfer` and `pairs` (KV hand-over), `toy` (a model of a few integers), `cluster` (faults and healing), `oracles` and
`audit` (what must hold), `run`. ARCHITECTURE.md says what is production code here and what is a model of it.
"""
