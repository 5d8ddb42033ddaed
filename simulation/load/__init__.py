"""A load on the virtual cluster: `workload.py` says what comes and what fails, `run.py` plays it, `figures.py` sums it up.

`crossdock simulate load` reads scenarios for it. Start with `workload.py`.
"""
