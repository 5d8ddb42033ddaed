"""Every setting of every role, once: name, unit, bounds, default and what a wrong value costs.

Values come from flags, then the environment (`CROSSDOCK_<OPTION>`), then one TOML file, then the defaults here;
`runtime.options` merges them, and makes the command line, its help and its errors from the same fields. The TOML file
has a section per role, its keys the option names with underscores:

    [gateway]
    port = 8080
    [worker]
    kv_gib = 4.0

Making an instance directly (`WorkerSettings(role="decode", model="…")`) reads neither environment nor file.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from runtime.addresses import EVERY_INTERFACE, Address, AdvertisedAddress, MetricsAddress, host_of
from runtime.cores import parse_cores
from runtime.setting_types import CommaList, Cores, Device, Dtype, Port, SecurityOptions, model_id_of


class CommonSettings(SecurityOptions):
    """What every role has."""

    name: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.:-]*$",
        description="Name of this process in logs and in status; empty: role and process id.",
    )
    heartbeat_ms: int = Field(
        500,
        ge=10,
        le=60_000,
        description="Milliseconds in which two heartbeats are sent. A peer silent for three and a half of these is taken for"
        " lost: too short makes a busy process look dead, too long delays recovery.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="Form of log lines; auto: console on a terminal, JSON elsewhere."
    )
    metrics: MetricsAddress = Field(
        "127.0.0.1:0",
        description="Address and port, or port on loopback, of this process's /metrics, /health and /ready; port 0: any free"
        " one, which crossdock status shows; off: none. Whoever reaches it can read it.",
    )


class CoordinatorSettings(CommonSettings):
    """Accept requests, place them on workers and tell the workers what to compute."""

    section = "coordinator"
    bind: Address = Field(
        "tcp://127.0.0.1:7070",
        description="Control port for gateways, workers and status. Beyond loopback it needs --keys.",
    )
    queue_requests_max: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Most requests waiting for a place. One more makes the newest of the largest backlog give way, in the"
        " lowest band first, or is answered with 429 if that is its own tenant's.",
    )
    queue_tokens_max: int = Field(
        4_000_000, ge=1, le=1 << 40, description="Most prompt tokens waiting for a place; likewise."
    )
    tenant_queue_max: int = Field(
        1024, ge=1, le=1_000_000, description="Most requests of one tenant waiting for a place; one more gets 429."
    )
    queue_wait_s_max: float = Field(
        120.0, gt=0, le=86_400.0, description="Seconds after which a request that found no place is answered with 503."
    )
    quantum_tokens: int = Field(
        1024,
        ge=0,
        le=1 << 24,
        description="Prompt tokens that an idle tenant of weight 1 saves up and has computed before others' when it comes"
        " back: about the prompt whose first token should not wait for other tenants. It widens the fairness bound.",
    )
    bypasses_max: int = Field(
        64,
        ge=1,
        le=1_000_000,
        description="After so many smaller requests got KV room before a large one in turn, room is kept for that one:"
        " lower keeps large requests from starving, higher keeps the pool fuller.",
    )
    step_tokens: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Token budget of one prefill step. Larger is faster for one prompt; smaller lets others, and"
        " cancels, in sooner. At most the prefill workers' --step-tokens-max.",
    )
    steps_in_flight: int = Field(
        2,
        ge=1,
        le=16,
        description="Steps sent ahead to one prefill worker. With 1 it idles for a round trip after each step; more"
        " than 2 delays cancels for nothing.",
    )
    tenants: str = Field(
        "",
        description="TOML file with bands, tenants, their limits and the hashes of their keys; read again when it changes"
        " and on SIGHUP. Gateways and coordinator must have the same one. Empty: one tenant without limits.",
    )
    usage_db: str = Field(
        "",
        description="SQLite file to which every request is written before it is acknowledged, for budgets that outlive a"
        " restart and for crossdock usage. Empty: no record, and budgets begin anew at each start.",
    )
    standby: bool = Field(
        False,
        description="Wait while another coordinator of this --usage-db serves on this host, and take over when it ends: new"
        " requests wait a fraction of a second then, not that of a start.",
    )
    usage_keep_days: int = Field(
        400, ge=0, le=36_500, description="Days after which a request's row is deleted from --usage-db; 0: never."
    )
    attempts_max: int = Field(
        8, ge=1, le=1_000, description="Attempts at one request, the first included, before it fails for good."
    )
    retry_floor: int = Field(
        100,
        ge=1,
        le=1_000_000,
        description="Interrupted requests that may come back within ten seconds, beside --retry-share. More wait for their"
        " turn: lower shields a cluster whose workers keep dying, higher lets a large one recover from a loss at once.",
    )
    retry_share: float = Field(
        1.0,
        ge=0.0,
        le=100.0,
        description="And so many more for each live request: with 1, each may come back once in that time.",
    )
    journal: str = Field(
        "",
        description="File to record decisions in, for crossdock replay and crossdock explain; never a prompt or a key. The"
        " last three of earlier processes stay beside it as FILE.1 to FILE.3. Empty: none.",
    )
    journal_max_mib: int = Field(
        1024, ge=1, le=1 << 20, description="Size in MiB at which recording stops, with a warning. Serving goes on."
    )
    kv_overcommit: float = Field(
        1.0,
        ge=1.0,
        le=16.0,
        description="How far the KV pools of decode workers may be overcommitted: answers are counted with their tenant's"
        " usual length, but at least max_tokens divided by this. 1: with max_tokens, and no answer ever has to make room"
        " for others; with more, those that must are computed again from where they were.",
    )

    @model_validator(mode="after")
    def _standby_needs_a_journal(self) -> Self:
        if self.standby and not self.usage_db:
            raise ValueError("--standby: needs --usage-db, whose lock says whose turn it is")
        return self


class _ClientSettings(CommonSettings):
    """What the roles that connect to the coordinator share."""

    coordinator: Address = Field("tcp://127.0.0.1:7070", description="Address of the coordinator.")
    model: str = Field(
        min_length=1,
        description="Folder with a model in Hugging Face format (config, tokenizer, safetensors), or ORG/NAME.",
    )
    model_id: str = Field(
        "", max_length=512, description="Model name that clients use; empty: the folder's name or ORG/NAME."
    )
    advertise: AdvertisedAddress = Field(
        "",
        description="Address others are told to reach this process at, like 10.0.0.5 or tcp://10.0.0.5:7070; without a port,"
        " the bound one. Empty: the bound address. Needed where it binds all interfaces, or is reached through another.",
    )

    drain_timeout_s: float = Field(
        20.0,
        ge=0,
        le=86_400,
        description="Seconds that running streams have to end by themselves after SIGTERM or Ctrl-C; a second one ends at once."
        " What a worker runs longer goes on elsewhere, in up to 5 s more; a gateway's fails.",
    )

    @property
    def served_model_id(self) -> str:
        return model_id_of(self.model, self.model_id)

    def _check_reachable(self, option: str, bound: str) -> None:
        if host_of(bound) in EVERY_INTERFACE and not self.advertise:
            raise ValueError(f"--advertise: needed, since {option} {bound} is not an address others can connect to")


class GatewaySettings(_ClientSettings):
    """Serve the OpenAI HTTP API."""

    section = "gateway"
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address the HTTP server listens on; 0.0.0.0 is every interface."
    )
    port: Port = Field(8000, description="Port of the HTTP server; 0: any free one, named in the log.")
    tokens_bind: Address = Field(
        "tcp://127.0.0.1:0", description="Port on which workers deliver tokens; 0: any free one."
    )
    api_keys: CommaList = Field(
        default_factory=list,
        description="Keys of the tenant 'default', separated by commas. Without any, here or in the tenants file, everyone is"
        " let in. Flags are visible in ps: prefer the environment or the file.",
    )
    tenants: str = Field(
        "",
        description="TOML file with bands, tenants, their limits and the hashes of their keys; read again when it changes"
        " and on SIGHUP. Gateways and coordinator must have the same one. Empty: one tenant without limits.",
    )
    default_max_tokens: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="Most tokens of an answer where the request does not say, cut to what the context leaves. It is"
        " also what such a request reserves of the KV cache.",
    )
    body_bytes_max: int = Field(
        8 << 20, ge=1024, le=1 << 30, description="Largest request body in bytes; over it is 413."
    )
    client_timeout_ms: int = Field(
        30_000,
        ge=100,
        le=3_600_000,
        description="Milliseconds in which a client must have sent its headers, then its body, and in which it must take the"
        " next piece of an answer. One that is slower is cut off, and its request cancelled.",
    )
    queue_wait_ms: int = Field(
        10_000,
        ge=0,
        le=3_600_000,
        description="Milliseconds a request waits for a coordinator that does not answer, before a 503.",
    )
    stream_idle_ms: int = Field(
        120_000,
        ge=100,
        le=86_400_000,
        description="Milliseconds without a token after which a stream counts as stuck and is failed. It spans the wait"
        " for the first token, so it bounds queueing and prefill too.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_reachable("--tokens-bind", self.tokens_bind)
        return self


class WorkerSettings(_ClientSettings):
    """Compute prompts (prefill) or stream answers (decode)."""

    section = "worker"
    role: Literal["prefill", "decode"] = Field(description="Which half of the work this process does.")
    device: Device = Field("auto", description="Where to compute; auto: the GPU if torch sees one, else the CPU.")
    dtype: Dtype = Field(
        "auto",
        description="Type of weights and KV cache. auto: float32 on CPU, as stored on a GPU. Workers must agree.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=1024,
        description="CPU threads of the model. More than the worker's own cores is far slower, not faster.",
    )
    kv_gib: float = Field(
        2.0, gt=0.0, le=16_384.0, description="Size of the KV cache in GiB. It bounds requests at once."
    )
    block_size: int = Field(
        16,
        ge=1,
        le=4096,
        description="Tokens per KV block; larger wastes more in last blocks. Of any two workers, one must have a multiple of"
        " the other's.",
    )
    prefix_cache: bool = Field(
        True,
        description="Keep the KV of prompts that are done, as long as nobody needs the room, and do not compute (prefill)"
        " or receive (decode) again what a new prompt of the same tenant begins with.",
    )
    max_seqs: int = Field(64, ge=1, le=65_536, description="Most sequences at once. More slow each stream down.")
    step_tokens_max: int = Field(
        2048,
        ge=1,
        le=65_536,
        description="Largest prefill step in tokens taken on. It bounds the memory of one forward pass.",
    )
    step_timeout_ms: int = Field(
        30_000,
        ge=0,
        le=86_400_000,
        description="Milliseconds after which a step that does not end counts as hung: the worker ends with status 75, to be"
        " started again, and its streams go on elsewhere. A step larger than any before, and one on a machine whose steps are"
        " slow, has longer. 0: never.",
    )
    kv_bind: Address = Field(
        "tcp://127.0.0.1:0", description="Port on which a decode worker is offered KV; 0: any free one."
    )
    transfer_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address of this host on which KV blocks themselves are received; only this one is listened on.",
    )
    kv_interface: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.:@-]*$",
        description="Network interface for KV blocks, like eth1: its address is the default of --transfer-host, and gloo and"
        " NCCL are told of it once, at the start. Empty: none is preferred.",
    )
    kv_transport: Literal["auto", "shm", "cuda_ipc", "nccl", "gloo"] = Field(
        "auto",
        description="How KV crosses: shm in one host, cuda_ipc on one GPU, nccl between GPUs, gloo between any two; auto: the"
        " best that a pair can use.",
    )
    kv_digest: Literal["full", "sampled"] = Field(
        "full", description="KV segments a decode worker on a GPU verifies: all, or one in 16. On the CPU always all."
    )
    kv_mib_per_s: int = Field(
        256,
        ge=0,
        le=1 << 20,
        description="MiB of KV per second taken in on a CPU while streams run, 64 at once; 0: no limit. More slows them.",
    )
    kv_timeout_ms: int = Field(
        10_000,
        ge=100,
        le=600_000,
        description="Milliseconds a KV transfer may stand still before it is given up and the request tried again.",
    )
    cpu_cores: Cores = Field(
        "",
        description="Cores of the thread that computes, like 1 or 0-2,5; the other threads use the rest. Empty: not pinned.",
    )
    nice: int = Field(
        0,
        ge=-20,
        le=19,
        description="Scheduling niceness of what computes, and of the process's session if it is its own; a prefill worker"
        " sharing cores should be at 5 or more.",
    )

    @property
    def cores(self) -> tuple[int, ...]:
        return parse_cores(self.cpu_cores)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transfer_host in (*EVERY_INTERFACE, "::"):
            raise ValueError(f"--transfer-host: {self.transfer_host} is every address; name the one KV is sent to")
        if self.role == "decode":
            self._check_reachable("--kv-bind", self.kv_bind)
        return self
