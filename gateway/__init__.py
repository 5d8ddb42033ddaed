"""The OpenAI-compatible HTTP server, and the owner of every stream.

- `streams` (pure): each live answer from its submission to its end. Start with `streams.keeper`.
- `openai`: request types, routes and answers. `text`: tokenizer, chat templates and detokenizer.
- `batches`: files and batches, which run offline. Start with `batches.runner`.
- `http`: the server and its bounds. `app` puts routes and errors together.
- `backend`: drives the stream keeper over links to the coordinator and the workers. `main`: the process.
"""
