"""Parameters that are known and not served."""

from collections.abc import Mapping
from typing import Any, Final

_NOTHING: Final[tuple[Any, ...]] = (None, [], {})
Neutral = Mapping[str, tuple[Any, ...]]
NEUTRAL_ONLY: Final[Neutral] = {
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "moderation": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "truncate_prompt_tokens": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "include_reasoning": (None, True),
    "guided_json_object": (None, False),
    "guided_whitespace_pattern": (None,),
    "guided_decoding_backend": (None,),
}  # Known but not supported: accepted only with a value that asks for nothing
INSTEAD: Final[dict[str, str]] = {
    "functions": "'tools' is their successor.",
    "function_call": "'tool_choice' is its successor.",
    "audio": "This server reads and writes text.",
    "modalities": "This server reads and writes text.",
    "moderation": "Moderate in the client.",
    "suffix": "Put the text behind the prompt into the prompt, as the model's own format has it.",
    "use_beam_search": "'n' and 'best_of' draw several answers.",
    "length_penalty": "It belongs to beam search.",
    "truncate_prompt_tokens": "/tokenize counts tokens before a request is sent.",
    "chat_template": "The model's own template is used; /v1/completions takes any text.",
    "continue_final_message": "/v1/completions goes on with any text.",
    "add_generation_prompt": "/v1/completions takes any text.",
    "web_search_options": "Search in the client, and send what was found as a message.",
}  # The fields that are served in place of those
