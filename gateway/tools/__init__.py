"""Tool calls and reasoning: what a chat template is given, what an answer may look like, and how it is read.

Start with `conversation`; `formats` has the table of forms in which models write calls, `reader` takes answers apart.
"""
