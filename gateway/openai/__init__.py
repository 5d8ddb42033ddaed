"""The OpenAI-compatible API: request types, routes, answers.

Start with `routes_generate`.
"""
