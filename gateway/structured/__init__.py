"""Structured output: what a request says of its answer's form → a grammar, checked before it is submitted.

Start with `request`; `schema` bounds JSON schemas, `lark` writes grammars, `checker` compiles them in processes of their own.
"""
