"""`crossdock simulate load`: `scenario.py` reads the TOML file, `load.py` runs it and shows the figures."""
