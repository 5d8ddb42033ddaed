"""The tenants file: who may use the service, and how much.

`tenants` parses the text, `file` watches the file on disk.
"""
