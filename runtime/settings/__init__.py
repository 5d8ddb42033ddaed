"""Every option of every role, and how options are read.

`roles` and `workers` list the options; `options` merges flags, environment, file and defaults.
"""
