"""The choice of the worker that serves a request, and of the chunks that make up a step. Pure.

Start with `schedule`.
"""
