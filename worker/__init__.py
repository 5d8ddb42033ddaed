"""The part that both kinds of workers share: start, registration with the coordinator, steps, metrics, drain, end.

`main` has the commands and `process` what surrounds a worker. Start with `driver`, which runs one role and says what it needs
of it.
"""
