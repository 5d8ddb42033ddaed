"""`crossdock profile`: profiles without a calibration."""
