"""The OpenAI-compatible API: request types, dependencies, routes, answers.

Start with `routes_generate`, then `generate`.
"""
