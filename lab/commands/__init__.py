"""The commands of the lab: `calibrate` measures this installation, `tune` looks for the best workers, `tune check` compares its
predictions with live runs, `profile` makes profiles, `autopilot` changes roles, and `simulate load` plays a scenario.
"""
