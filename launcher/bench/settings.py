"""Options of `crossdock bench`."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from launcher.load.settings import ServerSettings
from runtime.settings.types import JsonOption, Panels, split_commas

Sizes = Annotated[list[int], NoDecode, BeforeValidator(split_commas)]


class AgentsSettings(ServerSettings):
    """Conversations of several turns, like those of coding agents: how fast do their turns come back?

    Closed loop: a turn begins when the answer before it has ended and its user, or tool, has thought. Its prompt is all that
    came before and something new. Works with any server that speaks the OpenAI API; without --url it is the cluster that runs
    on this machine, and --start brings one up for the run.
    """

    panels: ClassVar[Panels] = {
        "Server": "url start api_key model device",
        "Sessions": "sessions turns system_tokens new_tokens output_tokens think_s seed",
        "Trace": "trace scale_tokens",
        "Tenants": "tenant",
        "What counts as good": "slo_ttft_ms slo_tpot_ms slo_itl_ms",
        "Output": "as_json",
    }
    sessions: int = Field(4, ge=1, le=10_000, description="Sessions at a time, dealt to the tenants by their shares.")
    turns: int = Field(6, ge=1, le=10_000, description="Turns of each.")
    system_tokens: int = Field(
        1200, ge=0, le=1_000_000, description="Length of the system prompt that all have in common."
    )
    new_tokens: int = Field(120, ge=1, le=1_000_000, description="Tokens that each turn adds.")
    output_tokens: int = Field(32, ge=1, le=1_000_000, description="Tokens of each answer.")
    think_s: float = Field(
        0.5, ge=0.0, le=86_400.0, description="Seconds between the end of an answer and the next turn."
    )
    trace: str = Field(
        "",
        description="File with sessions: CSV with session, turn, prompt_tokens, reused_tokens, output_tokens, think_s, or JSON"
        " lines of AIPerf or Mooncake with session_id, input_length, output_length and delay. In place of --turns and lengths.",
    )
    scale_tokens: float = Field(1.0, gt=0.0, le=1e3, description="Factor on all lengths of the trace.")


class IsolationSettings(JsonOption):
    """Do running streams slow down when long prompts arrive?

    Measures every gap between two tokens of one stream, at the client: first with steady streams alone, then while long
    prompts arrive back to back. Starts a cluster of its own, unless --url names one that is up.
    """

    panels: ClassVar[Panels] = {
        "Server": "url api_key model prefill decode",
        "Load": "streams",
        "Measurement": "seconds",
        "Output": "as_json plot",
    }
    url: str = Field("", description="Server that is up, like http://127.0.0.1:8000; empty: start a cluster.")
    api_key: str = Field("", description="Key for that server, if it wants one.")
    model: str = Field(
        "",
        description="Folder or ORG/NAME for the cluster started here; empty: the embedded default.",
        json_schema_extra={"also_argument": "MODEL"},
    )
    prefill: int = Field(1, ge=1, le=64, description="Prefill workers of the cluster started here.")
    decode: int = Field(1, ge=1, le=64, description="Decode workers of the cluster started here.")
    streams: int = Field(4, ge=1, le=256, description="Steady streams.")
    seconds: float = Field(30.0, ge=1.0, le=3600.0, description="Seconds of each of the two measurements.")
    plot: str = Field("", description="File for a picture (.svg, .png or .pdf); needs matplotlib.")


class ContinuitySettings(JsonOption):
    """What do users notice when a part of a server is killed?

    Sends greedy and seeded streams to any server that speaks the OpenAI API, and learns what each answers undisturbed. Then it
    runs your command at random moments while streams run, and counts errors and lost, repeated and changed tokens. The command
    should kill something and return; if nothing starts it again by itself, the command has to.
    """

    panels: ClassVar[Panels] = {
        "Server": "url api_key model",
        "Kills": "kill kills every_s",
        "Streams": "streams tokens seed",
        "Output": "as_json",
    }
    url: str = Field(description="Server, like http://127.0.0.1:8000.")
    api_key: str = Field("", description="Key for the server, if it wants one.")
    model: str = Field("", description="Model to ask for; empty: the first that the server names.")
    kill: str = Field(min_length=1, description="Command for the shell that kills, or breaks, a part of the server.")
    kills: int = Field(20, ge=1, le=10_000, description="How often it is run.")
    every_s: float = Field(
        5.0, ge=0.0, le=3600.0, description="Mean seconds from the first answer after a kill until the next one."
    )
    streams: int = Field(8, ge=1, le=256, description="Streams at a time.")
    tokens: int = Field(256, ge=8, le=4096, description="Tokens of each answer.")
    seed: int = Field(
        0, ge=0, le=1 << 31, description="Seed of prompts, of sampled streams, and of the moments of kills."
    )
