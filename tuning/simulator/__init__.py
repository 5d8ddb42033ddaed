"""The fast simulator: traffic against workers in virtual time, by a copy of the scheduler's rules, at a cost per request.

`cluster` is the loop of events; `order` says whose chunk is next, `room` what fits a decode worker, `batch` runs a decode batch
in closed form between joins and ends, and `outcome` has what clients would have seen.
"""
