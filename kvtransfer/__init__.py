"""Moving KV blocks from the worker that computed them to the worker that decodes.

`session` has the state machines of one transfer (start with `session.session`, which states the rules), `memory` what a
block is and how blocks are copied and checked, `transports` the ways to move bytes between two processes. `sender` and
`receiver` are the two ends that workers hold; `driver` is what both share. The frames are in `proto/kv.py`.
"""
