"""Run by test_installed_clients: a stream and a large body through a reverse proxy. Prints `ok` at the end."""

import sys

import httpx

base_url, host, model = sys.argv[1:]
TOKENS = 200
BODY = {"model": model, "prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}

with httpx.Client(base_url=base_url, headers={"Host": host}, timeout=120, trust_env=False) as client:
    with client.stream("POST", "/v1/completions", json=BODY) as answer:
        assert answer.status_code == 200, answer.read()
        pieces = list(answer.iter_raw())
    assert b"".join(pieces).rstrip().endswith(b"data: [DONE]")
    # A proxy that collects the answer passes it on in a few pieces of some KiB.
    assert len(pieces) > TOKENS / 4, len(pieces)
    large = client.post("/v1/completions", json={"model": model, "prompt": "word " * 400_000, "max_tokens": 1})
    assert large.json()["error"]["code"] == "context_length_exceeded", large.text
print("ok")
