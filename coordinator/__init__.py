"""Admission, placement and the life cycle of every request. Reads neither text nor tokens, and does nothing per token.

Start with `lifecycle` (the states), `events` (what comes in and goes out) and `core` (one handler for each event). Then read
`waiting.queue`, `placement.schedule` and `workers.pool`. All of these are pure; `main` is the process around them.
"""
