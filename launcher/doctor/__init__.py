"""`crossdock doctor`: names the cause of a fault, the evidence, and the setting to change. Start with `rules.py`."""
