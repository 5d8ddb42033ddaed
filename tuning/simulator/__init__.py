"""The fast simulator: traffic against workers in virtual time, by the coordinator's own rules, at a cost per request.

`cluster` is the loop of events; `order` says whose chunk is next, `room` what fits a decode worker, `batch` runs a decode batch
in closed form between joins and ends, and `outcome` has what clients would have seen.
"""
