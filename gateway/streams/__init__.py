"""The owner of every stream: from a prompt to its last token, whatever happens to workers. Pure.

Start with `keeper`.
"""
