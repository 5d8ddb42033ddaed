"""Moving KV blocks from the worker that computed them to the worker that decodes.

Read in this order: `layout` (what a block is), `session` (the life of one hand-over: rules, events, actions),
`sender_session` and `receiver_session` (the two pure machines, with their tables), `pool` (blocks as bytes), `digests` (how
it is known that they are right), `transport` (what differs between ways to send them), `shm` with `window`, `shm_socket`,
`shm_meeting`, `memory` and `copying`, `tcp` with `tcp_listener`, `tcp_pending`, `tcp_handshake`, `tcp_stream` and
`tcp_segments`, `gloo` with `rendezvous`, `transports` and `choice` (which one a pair uses), `pair`
(its thread), `driver` with `idle`, `sender` and `receiver` (what a worker holds, one each). Between GPUs: `cuda_ipc` with
`granted`, `cuda_memory` and `device_copy`; `nccl` with `line`, `device_thread` and `nccl_communicator`. `settings` has every
limit. The frames are in `proto/kv.py`.
"""
