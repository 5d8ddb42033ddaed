"""Run by test_installed_clients in an environment with instructor: one answer in each mode that OpenAI's and Anthropic's APIs
have. Prints `MODE ok`, or the error."""

import sys
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor  # type: ignore[import-not-found]
import openai
from instructor import Mode
from pydantic import BaseModel

base_url, model = sys.argv[1:]


class Weather(BaseModel):
    city: str
    days: int


JSON = '{"city": "Oslo", "days": 3}'
CALL = f'<tool_call>{{"name": "Weather", "arguments": {JSON}}}</tool_call>'
OPENAI = {
    Mode.TOOLS: CALL,
    Mode.TOOLS_STRICT: CALL,
    Mode.PARALLEL_TOOLS: CALL + "\n" + CALL,
    Mode.JSON: JSON,
    Mode.JSON_SCHEMA: JSON,
    Mode.MD_JSON: f"```json\n{JSON}\n```",
    Mode.RESPONSES_TOOLS: CALL,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS: CALL,
}
ANTHROPIC = {
    Mode.ANTHROPIC_TOOLS: CALL,
    Mode.ANTHROPIC_REASONING_TOOLS: CALL,
    Mode.ANTHROPIC_JSON: JSON,
    Mode.ANTHROPIC_PARALLEL_TOOLS: CALL + "\n" + CALL,
}


def ask(client: Any, mode: Mode, said: str, **options: Any) -> None:
    parallel = "PARALLEL" in mode.name
    if "RESPONSES" not in mode.name:
        options["messages"] = [{"role": "user", "content": f"Weather? @@@{said}@@@"}]
    else:
        options["input"] = f"Weather? @@@{said}@@@"
    wanted: Any = Iterable[Weather] if parallel else Weather
    create = client.responses.create if "RESPONSES" in mode.name else client.chat.completions.create
    found = create(model=model, response_model=wanted, max_retries=0, **options)
    expected = Weather(city="Oslo", days=3)
    assert [one.model_dump() for one in (found if parallel else [found])] == [expected.model_dump()] * (1 + parallel), (
        found
    )


failed = 0
plain = openai.OpenAI(base_url=f"{base_url}/v1", api_key="dummy", max_retries=0)
other = anthropic.Anthropic(base_url=base_url, api_key="dummy", max_retries=0)
for modes, make, client, options in (
    (OPENAI, instructor.from_openai, plain, {}),
    (ANTHROPIC, instructor.from_anthropic, other, {"max_tokens": 2000}),
):
    for mode, said in modes.items():
        try:
            ask(make(client, mode=mode), mode, said, **options)
            print(mode.name, "ok")
        except Exception as error:
            failed += 1
            print(mode.name, type(error).__name__, str(error)[:1500])
sys.exit(failed > 0)
