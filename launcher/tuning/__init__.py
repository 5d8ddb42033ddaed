"""The commands of the ratio lab: `calibrate` measures this installation, `tune` looks for the best ratio of workers, and
`tune check` compares its predictions with live runs. The package `tuning` does the computing.
"""
