"""The OpenAI-compatible HTTP front door, and the owner of every stream.

- `streams` (pure): each live answer from submission to its end: resumes, duplicates, gaps, waits. `stream_types` has
  its events, actions and options, `stream_state` what it remembers.
- `detokenize` (pure): tokens to text as they come, and stop strings.
- `api_types`, `prepare`: what a client may ask, checked, templated and tokenized. `tokenizer` loads what that needs.
- `backend`: drives `streams` over the links to the coordinator and from the workers.
- `answers`, `responses`: events of streams to OpenAI's JSON and server-sent events.
- `app`, `routes_generate`, `routes_info`, `body`, `errors`, `metrics`: the HTTP surface.
- `main`: the process.
"""
