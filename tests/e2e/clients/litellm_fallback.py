"""Run by test_installed_clients in an environment with LiteLLM: a prompt that is too long for one model goes to another, by all
three of its ways to speak with a server like ours."""

import sys

import litellm

small_url, small, large_url, large = sys.argv[1:]
PROMPT = "word " * 12_000 + "@@@From the large one.@@@"
for kind, path in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")):
    router = litellm.Router(
        model_list=[
            {
                "model_name": name,
                "litellm_params": {"model": f"{kind}/{model}", "api_base": url + path, "api_key": "dummy"},
            }
            for name, url, model in (("small", small_url, small), ("large", large_url, large))
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    answer = router.completion(model="small", messages=[{"role": "user", "content": PROMPT}], max_tokens=200)
    print(kind, answer.choices[0].message.content)
