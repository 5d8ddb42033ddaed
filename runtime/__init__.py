"""What every process runs on: one clock, one driver, ZeroMQ links, logs, settings. Decides nothing about requests.

- `clock`: the one place that reads time.
- `driver`: runs a process on uvloop with orderly signals, and drives a pure core.
- `link`: handshaken, heart-beating, bounded ZeroMQ connections that carry `proto` messages.
- `log`: structlog for people or for machines.
- `settings`: every option, validated once.
"""
