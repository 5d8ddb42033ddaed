"""Traffic against virtual workers in virtual time, placed by the real scheduler, at a cost per request and not per token.

`player` is the loop of events, and carries out what `scheduler.Scheduler` decides. `workers` has the virtual workers.
"""
