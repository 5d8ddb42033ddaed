"""Traces of requests, sent to an OpenTelemetry collector: `context` reads `traceparent`, `trace` gathers a request's times,
`spans` makes spans of them, and `tracer` decides which traces are sent. Only `export` imports OpenTelemetry.
"""
