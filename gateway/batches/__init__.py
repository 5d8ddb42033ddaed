"""Offline work in OpenAI's form: files of requests that run in the lowest priority class, as capacity is left over.

Everything is in one SQLite file (`store`), which all gateways of a host share. Clients reach it by `routes`; the gateway that
holds the file's lock answers the lines (`runner`), in the order of `line_queue`.
"""
