"""Admission, placement and the life cycle of every request. Never sees text or a token, and does nothing per token.

Read `lifecycle` (the states), `events` (what comes in and goes out), `core` (one handler for each event), then what the core
is made of: `queue`, `pool` (workers and what is reserved on them), `steps` (which chunks make one forward pass),
`choice` (which workers: `score` over what `locality` believes to be cached).
All of these are pure. `main` is the process around them.
"""
