"""Options of `crossdock profile`."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from lab.estimates.cards import CARDS
from runtime.settings.types import JsonOption, Panels


def known_card(value: str) -> str:
    """Returns the name in its usual spelling; an empty one stays empty."""
    found = value and next((name for name in CARDS if name.lower() == value.lower()), None)
    if found is None:
        raise ValueError(f"must be one of {', '.join(CARDS)}")
    return found


Gpu = Annotated[str, AfterValidator(known_card)]
EstimateSource = Literal["auto", "tables", "formula"]
Backend = Literal["vllm", "sglang", "trtllm"]


class EstimateSettings(JsonOption):
    """Estimate a profile of hardware that you do not have at hand.

    The times come from NVIDIA's tables of operators as they were measured, if the package aiconfigurator-core is installed and
    has them for this card and model. Else they come from the maker's figures of the card and the shape of the model, and are
    off by about a tenth, and by 40 % at most. Where you can, measure: crossdock calibrate, or crossdock profile from-vllm.
    """

    panels: ClassVar[Panels] = {
        "Hardware": "gpu tensor_parallel network_gbit_per_s cost_per_hour",
        "Model": "model",
        "Source": "source backend",
        "Worker": "",
        "Output": "out as_json",
    }
    gpu: Gpu = Field(min_length=1, description=f"The card: {', '.join(CARDS)}.")
    model: str = Field(
        min_length=1,
        description="Name like Llama-3.1-8B or Llama-3.1-70B-FP8, or a folder with the config.json of any other model.",
    )
    source: EstimateSource = Field(
        "auto",
        description="tables: measured operators; formula: data sheets; auto: tables where they have the operators.",
    )
    backend: Backend = Field("vllm", description="Engine with which the operators were measured.")
    tensor_parallel: int = Field(1, ge=1, le=16, description="Cards of one worker, over which each layer is split.")
    network_gbit_per_s: float = Field(
        200.0, gt=0.0, le=1e5, description="Gigabits per second over which a worker hands KV over."
    )
    cost_per_hour: float = Field(
        0.0, ge=0.0, le=1e6, description="What one worker costs in an hour, in any currency; 0: not known."
    )
    out: str = Field("profile.json", min_length=1, description="File to write the profile to.")


class FromVllmSettings(JsonOption):
    """Make a profile of a vLLM that runs, without stopping it.

    Give it what requests took, as --timings. The profile is of one instance, which computes prompts and answers alike.
    """

    panels: ClassVar[Panels] = {
        "Server": "url api_key model instances step_tokens seqs_max kv_tokens",
        "What is fitted to": "timings",
        "Hardware": "network_gbit_per_s cost_per_hour",
        "Output": "out as_json",
    }
    url: str = Field("", description="Address of the server: its KV cache and context are read there.")
    api_key: str = Field("", description="Key for --url, if it wants one.")
    timings: str = Field(
        min_length=1,
        description="File with what requests took: CSV with the columns arrival_s, prompt_tokens, output_tokens, ttft_ms,"
        " end_s (seconds since any moment), or what crossdock bench serve --url URL --json printed.",
    )
    model: str = Field(
        "",
        description="Its name, like Llama-3.1-8B, or a folder with its config.json: how large its KV is. Empty: ask --url.",
    )
    instances: int = Field(1, ge=1, le=64, description="Instances among which the requests of --timings were spread.")
    step_tokens: int = Field(2048, ge=16, le=65_536, description="Its --max-num-batched-tokens.")
    seqs_max: int = Field(256, ge=1, le=65_536, description="Its --max-num-seqs.")
    kv_tokens: int = Field(
        0, ge=0, le=1 << 40, description="Tokens that its KV cache holds, as it logs at start; 0: ask --url."
    )
    network_gbit_per_s: float = Field(
        200.0, gt=0.0, le=1e5, description="Gigabits per second over which a worker would hand KV over."
    )
    cost_per_hour: float = Field(
        0.0, ge=0.0, le=1e6, description="The cost of one instance in an hour, in any currency; 0: not known."
    )
    out: str = Field("profile.json", min_length=1, description="File to write the profile to.")
