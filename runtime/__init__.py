"""The base of every process. Decides nothing about requests.

- `process`: the clock, the log, exit statuses, and `driver`, which runs a process and its pure core.
- `link`: ZeroMQ connections with handshake and heartbeats that carry `proto` messages.
- `settings`: every option, validated once. `metrics`: Prometheus metrics and their port.
- `storage`: files and databases. `lease`: of several processes, one leads.
- `tenancy`: the tenants file. `worker`: what both kinds of workers share.
"""
