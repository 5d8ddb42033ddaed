"""vLLM's endpoints beside OpenAI's: /tokenize and /detokenize.

Start with `routes`.
"""
