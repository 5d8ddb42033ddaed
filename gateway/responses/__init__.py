"""OpenAI's /v1/responses, on the core of /v1/chat/completions.

Start with `routes`: `convert` turns a request into one for chat, `answer` writes what comes, `store` keeps it for a while.
"""
