"""The coordinator: it owns the scheduler, lets requests in, bills, recovers and reports. It reads neither text nor tokens, and
does nothing per token.

Start with `events` (what comes in and goes out) and `core` (one handler for each kind of message), then read `state`, which
carries out what `scheduler` decides. All of these are pure; `main` is the process around them.
"""
