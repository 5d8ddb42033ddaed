"""`crossdock simulate load`: `scenario.py` has the format of the file, `build.py` makes a workload of it, `load.py` runs it and
shows the figures."""
