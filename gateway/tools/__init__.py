"""Tool calls and reasoning: the inputs of chat templates, the grammars of answers, and how answers are read.

Start with `conversation`; `formats` has the table of forms in which models write calls, `reader` takes answers apart.
"""
