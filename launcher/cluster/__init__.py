"""Clusters of several hosts: `cluster.toml`, systemd units, ssh.

Start with `file`.
"""
