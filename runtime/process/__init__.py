"""What a single process needs: clock, log, exit statuses, sd_notify, niceness, descriptors.

Start with `driver`, which runs a process.
"""
