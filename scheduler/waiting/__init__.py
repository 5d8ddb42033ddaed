"""The requests that wait: their queue, their deadlines, and which are shed when there are too many. Pure.

Start with `queue`.
"""
