"""The wire contract: message types, codec, limits and errors. Imports nothing of ours.

Read in this order: `limits` (every bound on the wire), `errors` (who is at fault), `sampling` (how tokens are drawn),
`messages` (who says what to whom), `drain` (a worker leaves), `kv` (the hand-over of KV blocks), `codec` (bytes in, typed
messages out), `newer` (the first message of a link, and what peers of another version say).
"""
