"""The file of `crossdock simulate load`: `scenario.py` has its format, `build.py` makes a workload of it, and `requirements.py`
compares the figures of a run with what the file asks for."""
