"""The scheduler's knowledge of workers: reservations, prefix caches, free KV blocks, circuit breakers. Pure.

Start with `pool`.
"""
