"""The answers of the API, as types: `tools.openapi` describes them. The gateway writes answers without them, because validating
each event of a stream would cost more than the rest of it; `tests/gateway/test_answer_types.py` checks answers against them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class AnswerType(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorBody(AnswerType):
    message: str
    type: str
    param: str | None = Field(description="The parameter at fault.")
    code: str | None
    request_id: str = Field(description="As in the header `X-Request-Id`.")


class Error(AnswerType):
    error: ErrorBody


class AnthropicErrorBody(AnswerType):
    type: str
    message: str


class AnthropicError(AnswerType):
    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str = Field(description="As in the header `X-Request-Id`.")


class EndedSession(AnswerType):
    id: str
    object: Literal["session"]
    deleted: Literal[True]


class Status(AnswerType):
    status: Literal["ok"]


class Ready(AnswerType):
    status: Literal["ready"]
    warnings: list[str] | None = Field(None, description="What a model served here cannot do, and why.")


class Version(AnswerType):
    version: str


class Model(AnswerType):
    id: str
    object: Literal["model"]
    created: int = Field(description="When this gateway started, in seconds since 1970.")
    owned_by: str
    root: str = Field(description="The model's own id, where `id` is another name for it.")
    max_model_len: int = Field(description="Tokens of prompt and answer together.")
    max_input_tokens: int = Field(description="The longest prompt. Anthropic's, as what follows.")
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(AnswerType):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False] = Field(description="Anthropic's, as what follows: this is all of them.")
    first_id: str
    last_id: str


class PromptTokensDetails(AnswerType):
    cached_tokens: int = Field(description="Prompt tokens that were not computed for this request.")


class CompletionTokensDetails(AnswerType):
    reasoning_tokens: int = Field(description="Tokens of thoughts, which are among the completion tokens.")


class Usage(AnswerType):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(AnswerType):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(AnswerType):
    logprob: float
    rank: int = Field(description="Its place among all tokens at its place; 1 is the likeliest.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(AnswerType):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = Field(None, description="By token id. vLLM's.")


class Completion(AnswerType):
    """Also each event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = Field(None, description="Answers to the same request can be equal where this is.")
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(AnswerType):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobWithTop(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerType):
    content: list[TokenLogprobWithTop] | None
    refusal: None = None


class AnsweredFunction(AnswerType):
    name: str
    arguments: str = Field(description="The text of a JSON object.")


class AnsweredCall(AnswerType):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatAnswerMessage(AnswerType):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, description="What the model thought before it answered.")
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(AnswerType):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(AnswerType):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None = Field(None, description="Answers to the same request can be equal where this is.")
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = Field(None, description="By token id. vLLM's.")


class FunctionDelta(AnswerType):
    name: str | None = None
    arguments: str = Field(description="What is to be appended.")


class CallDelta(AnswerType):
    """The first of a call has its id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(AnswerType):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(AnswerType):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(AnswerType):
    """Each event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = Field(None, description="Answers to the same request can be equal where this is.")
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


# --- /v1/responses and /v1/messages: what is in them depends on the kinds of items, as their own references say ---------


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]] = Field(description="Items: message, function_call and reasoning.")
    usage: dict[str, Any] | None


class ResponseEvent(BaseModel):
    """Each event of a stream."""

    type: str
    sequence_number: int


class DeletedResponse(AnswerType):
    id: str
    object: Literal["response"]
    deleted: bool


class AnthropicMessage(AnswerType):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks: text, tool_use and thinking.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: dict[str, int]


class MessageEvent(BaseModel):
    """Each event of a stream."""

    type: str


class TokenCount(AnswerType):
    input_tokens: int


# --- /tokenize, /detokenize, files and batches ---------------------------------------------------------------------------


class TokenizeAnswer(AnswerType):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(AnswerType):
    prompt: str


class TokenizerInfo(AnswerType):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | dict[str, str] | None


class FileObject(AnswerType):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(AnswerType):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(AnswerType):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(AnswerType):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(AnswerType):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(AnswerType):
    total: int
    completed: int
    failed: int


class BatchObject(AnswerType):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None = Field(description="Lines that are wrong, where the batch has failed.")
    input_file_id: str
    completion_window: str
    status: Literal["validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(AnswerType):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
