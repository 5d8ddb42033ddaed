"""Settings of the workers."""

from typing import ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from proto.limits import MAX_CONTEXT_TOKENS, MAX_ID_CHARS
from proto.messages import Role
from proto.parts import STALL_SHARE, STEP_TOKENS
from runtime.settings.addresses import EVERY_INTERFACE, Address
from runtime.settings.common import ClientSettings
from runtime.settings.cores import parse_cores
from runtime.settings.types import WEIGHTS_HELP, Cores, Device, Dtype, EngineOptions, Panels, Weights

GPU_MEMORY_SHARE: Final = 0.9  # of all workers on a GPU together, by default
MIXED_NAME_CHARS: Final = MAX_ID_CHARS - len("-prefill")


def gpu_share_of(workers: int) -> float:
    """The share of each, if so many share a GPU."""
    return round(GPU_MEMORY_SHARE / workers, 3)


class WorkerSettings(ClientSettings, EngineOptions):
    """Compute prompts (prefill), stream answers (decode), or do both (mixed)."""

    section = "worker"
    panels: ClassVar[Panels] = {
        "Model": "role model model_id revision max_model_len device dtype weights",
        "Engine": "engine engine_python vllm_args",
        "Compute": "threads cpu_cores max_seqs step_tokens_max stall_share",
        "KV cache": "kv_gib gpu_memory_share prefix_cache kv_tier_gib kv_tier_folder",
        "KV transfer": "kv_bind transfer_host kv_transport transfer_encryption",
        "Expert options": "nice step_timeout_ms block_size",
    }
    role: Literal["prefill", "decode", "mixed"] = Field(
        description="The half of the work that this process does. mixed: both, in turn, over one copy of the weights. It"
        " registers as two workers, NAME-prefill and NAME-decode, that share its KV cache. crossdock flip changes the role of a"
        " running process."
    )
    revision: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.-]*\z",
        description="Name of the model's revision, like v2. Workers exchange KV within one revision only, and"
        " crossdock rollout says which requests each gets. Give --model-id too, so that all revisions have one name for"
        " clients. Its config.json and tokenizer.json must be those of the others.",
    )
    max_model_len: int = Field(
        0,
        ge=0,
        le=MAX_CONTEXT_TOKENS,
        description="Most tokens of prompt and answer together; fewer than the model's own context need a smaller KV cache."
        " 0: the model's own. Gateways learn it from the workers, of which the smallest counts.",
    )
    device: Device = Field("auto", description="Where to compute; auto: the GPU if torch sees one, else the CPU.")
    dtype: Dtype = Field(
        "auto",
        description="Type of weights and KV cache. auto: float32 on CPU, as stored on a GPU. Workers must agree.",
    )
    weights: Weights = Field("float32", description=WEIGHTS_HELP + " Workers must agree.")
    threads: int = Field(
        1,
        ge=1,
        le=1024,
        description="CPU threads of the model. More than the worker's own cores is far slower, not faster.",
    )
    kv_gib: float = Field(
        2.0,
        gt=0.0,
        le=16_384.0,
        description="Size of the KV cache in GiB. It bounds requests at once. On a GPU, if it is not given: what"
        " --gpu-memory-share leaves.",
    )
    gpu_memory_share: float = Field(
        GPU_MEMORY_SHARE,
        gt=0.0,
        le=1.0,
        description="Share of the GPU's memory that this worker takes, with weights, one forward pass of --step-tokens-max and"
        " the KV cache. Workers that share a GPU need less each: crossdock serve and up divide the default among them.",
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
        description="Keep the KV of finished prompts until its room is needed. If a new prompt of the same tenant begins"
        " alike, that part is not computed (prefill) or received (decode) again.",
    )
    kv_tier_gib: float = Field(
        0.0,
        ge=0.0,
        le=1 << 20,
        description="A prefill worker copies the KV that it computes to a second tier of this size in GiB: a file, or host"
        " memory on a GPU. It takes it from there when its KV cache has given it up, unless computing it is faster. 0: none.",
    )
    kv_tier_folder: str = Field(
        "", max_length=4096, description="Folder for the file of --kv-tier-gib. Empty: that for temporary files."
    )
    max_seqs: int = Field(
        64,
        ge=1,
        le=65_536,
        description="Most sequences at once. More slow each stream down.",
        json_schema_extra={"aliases": ["--max-num-seqs"]},
    )
    step_tokens_max: int = Field(
        2048,
        ge=1,
        le=65_536,
        description="Largest prefill step in tokens taken on. It bounds the memory of one forward pass.",
    )
    stall_share: float = Field(
        STALL_SHARE,
        ge=0.0,
        le=16.0,
        description="A decode worker computes what a prompt adds to KV that it has, if that is the first to be done, between"
        " steps of its streams: for so much of a step's time at most, or what their targets for the time per token leave"
        " where all have one. 0, and on a GPU: it computes no prompts.",
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
        description="Address or network interface of this host, like eth1, on which KV blocks themselves are received; only its"
        " address is listened on, and NCCL uses only its interface.",
    )
    kv_transport: Literal["auto", "shm", "cuda_ipc", "nccl", "tcp"] = Field(
        "auto",
        description="How KV crosses: shm in one host, cuda_ipc on one GPU, nccl between GPUs, tcp between any two; auto: the"
        " best of these that a pair can use, with --keys without nccl, which sends KV in the clear.",
    )
    transfer_encryption: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Encryption of KV between hosts by tcp (AES-256-GCM, with a key that travels over the CURVE link). auto:"
        " with --keys. on: also refuse nccl, which sends KV in the clear, where --kv-transport asks for it; needs"
        " --keys. off: in the clear, unless the other worker wants it encrypted.",
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
    def pool(self) -> str:
        """The model id, with the revision: workers of one pool work together."""
        return f"{self.served_model_id}@{self.revision}" if self.revision else self.served_model_id

    @property
    def kv_bytes(self) -> int:
        return int(self.kv_gib * (1 << 30))

    def tier_blocks(self, block_bytes: int) -> int:
        """KV blocks of this size in the second tier."""
        has_tier = self.role == "prefill" and self.prefix_cache
        return int(self.kv_tier_gib * (1 << 30)) // block_bytes if has_tier else 0

    def kv_bytes_on(self, device: str) -> int | None:
        """Bytes of the KV pool on this device; None: as much as `gpu_memory_share` leaves."""
        return self.kv_bytes if device == "cpu" or "kv_gib" in self.model_fields_set else None

    def step_tokens_on(self, on_gpu: bool) -> int:
        """Tokens of a prefill step, unless the coordinator's --step-tokens says it."""
        return self.step_tokens_max if on_gpu else min(STEP_TOKENS, self.step_tokens_max)

    @property
    def cores(self) -> tuple[int, ...]:
        return parse_cores(self.cpu_cores)

    def in_role(self, role: Role) -> Self:
        """The same process in that role. Raises `ValueError` with the option that does not suit it."""
        changed = self.model_copy(update={"role": str(role)})
        changed._check_role()
        return changed

    def _check_role(self) -> None:
        if self.role != "prefill":
            self._check_reachable("--kv-bind", self.kv_bind)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transfer_host in (*EVERY_INTERFACE, "::"):
            raise ValueError(f"--transfer-host: {self.transfer_host} is every address; name the one KV is sent to")
        if self.transfer_encryption == "on" and not self.keys:
            raise ValueError(
                "--transfer-encryption: on needs --keys, since its key travels over the link between the two"
            )
        if self.role == "mixed" and len(self.name) > MIXED_NAME_CHARS:
            raise ValueError(
                f"--name: at most {MIXED_NAME_CHARS} characters, since mixed workers register as NAME-prefill and NAME-decode"
            )
        self._check_role()
        return self

    @property
    def confidential_transfers(self) -> bool:
        """Whether no KV may leave this host in the clear: with keys, unless the options say otherwise by name."""
        return self.transfer_encryption == "on" or (self.encrypts_transfers and self.kv_transport == "auto")

    @property
    def encrypts_transfers(self) -> bool:
        """Whether KV must cross encrypted by `tcp`."""
        return self.transfer_encryption == "on" or (self.transfer_encryption == "auto" and bool(self.keys))
