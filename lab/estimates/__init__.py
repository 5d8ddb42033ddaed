"""Profiles without a calibration: from figures that makers publish, or from what a running server's requests took. Pure."""
