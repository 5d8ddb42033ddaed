"""The needs of a single process: clock, log, exit statuses, sd_notify, niceness, descriptors.

Start with `driver`, which runs a process.
"""
