"""vLLM's endpoints beside OpenAI's: /tokenize, /detokenize and /tokenizer_info.

Start with `routes`.
"""
