"""Anthropic's /v1/messages and /v1/messages/count_tokens, on the core of /v1/chat/completions.

Start with `routes`: `convert` turns a request into one for chat, `answer` writes what comes.
"""
