"""Run by test_installed_clients in an environment with Anthropic's SDK: its tool runner, plain and streamed."""

import sys

import anthropic
from anthropic import beta_tool

base_url, model = sys.argv[1:]
PROMPT = '@@@<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>%%%It says: $RESULT@@@'


@beta_tool
def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where
    """
    return f"rain in {city}"


with anthropic.Anthropic(base_url=base_url, api_key="dummy", max_retries=0) as client:
    for stream in (False, True):
        runner = client.beta.messages.tool_runner(
            model=model, max_tokens=1000, tools=[weather], messages=[{"role": "user", "content": PROMPT}], stream=stream
        )
        print("streamed" if stream else "plain", runner.until_done().content[0].text)
