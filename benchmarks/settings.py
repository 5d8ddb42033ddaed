"""Options of the benchmarks of single parts."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from runtime.settings.types import CommaList, JsonOption, KeyOptions, Panels, split_commas

Sizes = Annotated[list[int], NoDecode, BeforeValidator(split_commas)]


class HarmlessSettings(JsonOption):
    """Do running streams slow down when KV arrives?

    Streams run on a decode worker on the CPU while the stored KV of a long prompt is sent to it back to back. No prompt is
    computed meanwhile, so this is what transfers alone cost. Rounds with and without them take turns.
    """

    panels: ClassVar[Panels] = {
        "Worker": "model threads kv_transport",
        "Load": "streams stream_tokens prompt_tokens",
        "Measurement": "rounds seconds",
        "Output": "as_json",
    }
    model: str = Field(
        "", description="Folder or ORG/NAME; empty: the embedded default.", json_schema_extra={"also_argument": "MODEL"}
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the worker; 0: as the cores allow.")
    kv_transport: Literal["auto", "shm", "tcp"] = Field("auto", description="How KV crosses; auto: the best there is.")
    streams: int = Field(4, ge=1, le=64, description="Running streams.")
    stream_tokens: int = Field(384, ge=8, le=8192, description="Tokens of each, after which it starts again.")
    prompt_tokens: int = Field(1400, ge=64, le=2048, description="Tokens of the prompt whose KV arrives.")
    rounds: int = Field(6, ge=1, le=1000, description="Rounds of each kind.")
    seconds: float = Field(10.0, ge=1.0, le=3600.0, description="Seconds of each round.")


class EngineBenchSettings(JsonOption):
    """How near does the engine come to what this machine allows?

    The engine alone decodes 1 to 16 streams, one long stream and streams with sampling, and computes prompts of 1,000 and
    1,400 tokens, beside plain transformers. The floor of each is what it must read over the bandwidth of
    memory, or what it must compute over the rate of a large matrix product, both measured in between.
    """

    panels: ClassVar[Panels] = {
        "Engine": "model device threads",
        "Measurement": "rounds llama_bench gguf",
        "Output": "as_json",
    }
    model: str = Field(
        "", description="Folder or ORG/NAME; empty: the embedded default.", json_schema_extra={"also_argument": "MODEL"}
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where to compute.")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads.")
    rounds: int = Field(5, ge=1, le=1000, description="Rounds measured; one more comes first and is not counted.")
    llama_bench: str = Field("", description="llama.cpp's program llama-bench, to run as well; needs --gguf.")
    gguf: str = Field("", description="The model for it, a GGUF file.")

    @model_validator(mode="after")
    def _check_llama_bench(self) -> Self:
        if bool(self.llama_bench) != bool(self.gguf):
            given, other = ("--llama-bench", "--gguf") if self.llama_bench else ("--gguf", "--llama-bench")
            raise ValueError(f"{given}: needs {other}, too")
        return self


class CoordinatorBenchSettings(JsonOption):
    """The cost of a decision of the coordinator: next chunk, new request, a whole life; CPU time, no cluster needed.

    Then, around a cluster in virtual time, what a request costs with many workers against one pair.
    """

    requests: int = Field(100_000, ge=1_000, le=10_000_000, description="Requests waiting in the queue.")
    workers: int = Field(
        256,
        ge=0,
        le=1024,
        description="Prefill workers of the cluster in virtual time, and as many for decode; 0: without.",
    )
    tenants: int = Field(10_000, ge=1, le=1_000_000, description="Tenants whose requests wait there.")
    served: int = Field(20_000, ge=100, le=10_000_000, description="Requests that it serves while measured.")


class FairnessSettings(JsonOption):
    """Does a small tenant wait when another floods the service?

    Starts a cluster with two tenants and measures the small one's time to first token over HTTP, first alone, then while
    the other keeps long prompts in the server.
    """

    panels: ClassVar[Panels] = {
        "Server": "model prefill decode",
        "Small tenant": "requests every_s prompt_words",
        "Flood": "flood_words flood_at_once warmup_s",
        "Output": "seed as_json",
    }
    model: str = Field(
        "", description="Folder or ORG/NAME; empty: the embedded default.", json_schema_extra={"also_argument": "MODEL"}
    )
    prefill: int = Field(1, ge=1, le=64, description="Prefill workers.")
    decode: int = Field(1, ge=1, le=64, description="Decode workers.")
    requests: int = Field(30, ge=5, le=10_000, description="Requests of the small tenant in each phase.")
    every_s: float = Field(6.0, gt=0.0, le=3600.0, description="Mean seconds between two of them; times are random.")
    prompt_words: int = Field(250, ge=1, le=100_000, description="Words of each, about one token each.")
    flood_words: int = Field(1200, ge=1, le=100_000, description="Words of the other's prompts.")
    flood_at_once: int = Field(8, ge=1, le=1024, description="Its prompts in the server at any time.")
    warmup_s: float = Field(15.0, ge=0.0, le=600.0, description="Seconds of flood before the second phase.")
    seed: int = Field(0, ge=0, le=1 << 31, description="Seed of times and words.")


class RoomBenchSettings(JsonOption):
    """How full the KV pool of a decode worker gets under overload, and whether it ever runs out; in virtual time, no model."""

    kv_blocks: int = Field(2048, ge=64, le=1 << 20, description="Blocks of the pool.")
    block_size: int = Field(16, ge=1, le=4096, description="Tokens per block.")
    max_tokens: int = Field(
        256, ge=16, le=100_000, description="Most tokens of an answer; prompts are given in parts of it."
    )
    overload: float = Field(2.0, ge=0.1, le=100.0, description="Offered load, in what a pool always full could carry.")
    steps: int = Field(1500, ge=10, le=1_000_000, description="Decode steps measured, after a warm-up.")
    seed: int = Field(0, ge=0, le=1 << 31, description="Seed of arrivals, lengths and delays.")


class KvBenchSettings(JsonOption):
    """How fast KV moves from one process to another, by each transport, beside memcpy and a raw TCP socket.

    Two real processes on this machine; no model needed.
    """

    panels: ClassVar[Panels] = {
        "What is sent": "transports segment_kib block_kib session_mib scattered",
        "Measurement": "rounds seed",
        "Output": "as_json",
    }
    transports: CommaList = Field(
        default=["shm", "tcp", "tcp-plain"],
        description="Transports to measure, separated by commas: shm, tcp (encrypted), tcp-plain.",
    )
    segment_kib: Sizes = Field(
        default=[64, 512, 4096, 16384, 65536], description="Sizes of one message in KiB, separated by commas."
    )
    block_kib: Sizes = Field(default=[64, 512], description="Sizes of one KV block in KiB, multiples of 8, likewise.")
    rounds: int = Field(7, ge=1, le=1000, description="Rounds; the figures are medians.")
    session_mib: int = Field(
        1024,
        ge=256,
        le=8192,
        description="KV of one session where segments are large: so much that its beginning and end, which are measured apart, "
        "hardly count. The two processes take four times that.",
    )
    scattered: bool = Field(False, description="Blocks in random places, not one after the other.")
    seed: int = Field(0, ge=0, le=1 << 31, description="Seed of the places of blocks.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not 8 <= size <= 65_536 or size % 8 for size in self.block_kib):
            raise ValueError("--block-kib: each must be a multiple of 8, up to 65536")
        if any(not 8 <= size <= 65_536 for size in self.segment_kib):
            raise ValueError("--segment-kib: each must be between 8 and 65536")
        return self


class HandoverSettings(KeyOptions, JsonOption):
    """How much does moving a prompt's KV to decode delay its stream?

    Sends long prompts one by one to a cluster of its own. Measures how much of the transfer prefill did not hide, and the gap
    before the second token beside the gaps that follow.
    """

    panels: ClassVar[Panels] = {
        "Server": "model threads keys",
        "Load": "prompts prompt_words output_tokens seed",
        "Output": "as_json",
    }
    model: str = Field(
        "", description="Folder or ORG/NAME; empty: the embedded default.", json_schema_extra={"also_argument": "MODEL"}
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of each worker; 0: as the cores allow.")
    prompts: int = Field(10, ge=1, le=10_000, description="Prompts measured; one more comes first and is not counted.")
    prompt_words: int = Field(1400, ge=1, le=100_000, description="Words of each, about one token each.")
    output_tokens: int = Field(32, ge=4, le=100_000, description="Tokens of each answer.")
    seed: int = Field(0, ge=0, le=1 << 31, description="Seed of the words.")
