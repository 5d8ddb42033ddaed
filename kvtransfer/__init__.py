"""Moving KV blocks from the worker that computed them to the worker that decodes.

Read in this order: `layout` (what a block is), `session` (the life of one hand-over: rules, events, actions),
`sender_session` and `receiver_session` (the two pure machines, with their tables), `rendezvous` and `pair` (a process
group of two and its thread), `pool` (blocks as bytes), `driver`, `sender` and `receiver` (what a worker holds, one
each). `settings` has every limit. The frames are in `proto/kv.py`.
"""
