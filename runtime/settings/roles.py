"""Every setting of every role, once: name, unit, bounds, default and what a wrong value costs.

Values come from flags, then the environment (`CROSSDOCK_<OPTION>`), then one TOML file, then the defaults here;
`runtime.settings.options` merges them, and makes the command line, its help and its errors from the same fields. The TOML file
has a section per role, its keys the option names with underscores:

    [gateway]
    port = 8080
    [worker]
    kv_gib = 4.0

Making an instance directly (`WorkerSettings(role="decode", model="…")`) reads neither environment nor file.
"""

from typing import ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from runtime.settings.addresses import Address, check_database
from runtime.settings.common import ClientSettings, CommonSettings
from runtime.settings.types import CommaList, HostNames, Networks, Options, Panels, Port, model_id_of


class CoordinatorSettings(CommonSettings):
    """Accept requests, place them on workers and tell the workers what to compute."""

    section = "coordinator"
    panels: ClassVar[Panels] = {
        "Network": "bind",
        "Tenants and records": "tenants usage_db database usage_keep_days event_log",
        "Dashboard": "admin_key_file",
        "Queue": "queue_requests_max tenant_queue_max queue_wait_s_max",
        "Scheduling": "step_tokens kv_overcommit",
        "Recovery": "standby",
        "Expert options": "event_log_max_mib",
    }
    bind: Address = Field(
        "tcp://127.0.0.1:7070",
        description="Control port for gateways, workers and status. Beyond loopback it needs --keys.",
    )
    queue_requests_max: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Most requests that wait. When one more comes, the newest request of the largest backlog in the lowest"
        " priority class gets 429; if that backlog is its own tenant's, the new request does. Likewise beyond 4,000,000"
        " tokens of prompts.",
    )
    tenant_queue_max: int = Field(
        1024, ge=1, le=1_000_000, description="Most requests of one tenant that wait; one more gets 429."
    )
    queue_wait_s_max: float = Field(
        120.0,
        gt=0,
        le=86_400.0,
        description="Seconds after which a request that still waits gets 503, unless its priority class in --tenants sets"
        " queue_wait_s. For as long after the loss of a role's last worker, new requests wait for its restart.",
    )
    step_tokens: int = Field(
        0,
        ge=0,
        le=65_536,
        description="Token budget of one prefill step. A larger budget is faster for one prompt; with a smaller one, other"
        " prompts and cancellations wait less. At most the prefill workers' --step-tokens-max. 0: what each worker says, 256"
        " on a CPU and its --step-tokens-max on a GPU.",
    )
    tenants: str = Field(
        "",
        description="TOML file with priority classes, tenants, their limits and the hashes of their keys; read again when"
        " it changes and on SIGHUP. Gateways and coordinator must have the same one. Empty: one tenant without limits.",
    )
    usage_db: str = Field(
        "",
        description="SQLite file to which every request is written before it is acknowledged, for budgets that outlive a"
        " restart and for crossdock usage. Empty: no record, and budgets are reset at each start.",
    )
    database: str = Field(
        "",
        max_length=4096,
        description="PostgreSQL in place of --usage-db, as postgresql://USER@HOST/NAME, without a password: PGPASSWORD or a"
        " passfile has it. Of all coordinators with the same one, on any hosts, one serves and the others stand by.",
    )
    standby: bool = Field(
        False,
        description="Wait while another coordinator of this --usage-db serves on this host, and take over when it ends."
        " New requests then wait for a fraction of a second, not for a start.",
    )
    usage_keep_days: int = Field(
        400, ge=0, le=36_500, description="Days after which the ledger's row of a request is deleted; 0: never."
    )
    event_log: str = Field(
        "",
        description="File to record decisions in, for crossdock replay and crossdock explain; without prompts and keys. The"
        " last three files of earlier processes are kept as FILE.1 to FILE.3. Empty: none.",
    )
    event_log_max_mib: int = Field(
        1024, ge=1, le=1 << 20, description="Size in MiB at which recording stops, with a warning. Serving goes on."
    )
    admin_key_file: str = Field(
        "",
        description="File with a key of at least 16 characters, which people type into /dashboard of --metrics to drain"
        " workers, change roles and policies, and see timelines. Empty: the dashboard only shows.",
    )
    kv_overcommit: float = Field(
        64.0,
        ge=1.0,
        le=1024.0,
        description="How far the KV pools of decode workers may be overcommitted: answers are counted with the length that nine"
        " of ten of their tenant's do not exceed, but at least max_tokens divided by this. With 1 they are counted with"
        " max_tokens and never preempted. With more, a preempted answer is computed again and continues where it was.",
    )

    @model_validator(mode="after")
    def _check_leadership(self) -> Self:
        if self.database:
            check_database("--database", self.database)
            if self.usage_db or self.standby:
                raise ValueError("--database: takes the place of --usage-db and --standby; leave them out")
        if self.standby and not self.usage_db:
            raise ValueError("--standby: needs --usage-db, whose lock decides which coordinator serves")
        return self


BATCHES_OFF: Final = ("", "off")


class BatchOptions(Options):
    """The bounds of `/v1/files` and `/v1/batches`."""

    batch_db: str = Field(
        "",
        description="SQLite file for /v1/files and /v1/batches, on a local disk; gateways of one host that serve the same"
        " models may share it, and one of them runs the batches. Empty: --database if there is one. Off: neither is served.",
    )
    batch_lines_max: int = Field(
        32,
        ge=1,
        le=1024,
        description="Most requests of batches being answered at once. More keep a larger cluster busy.",
    )
    batch_tenant_mib: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="Most MiB of files and results of one tenant; each file and batch counts 16 KiB more. Over it, uploads and"
        " new batches get 403, and requests of batches that have not run get an error.",
    )
    batch_keep_days: int = Field(30, ge=1, le=3650, description="Days after which files and ended batches are deleted.")


class JwtOptions(Options):
    """JSON Web Tokens in place of API keys."""

    jwt_issuer: str = Field(
        "",
        max_length=1024,
        description="Issuer of JSON Web Tokens (their claim iss) that clients may send in place of API keys. Needs --jwt-jwks,"
        " --jwt-audience and --tenants. Empty: no tokens are taken.",
    )
    jwt_audience: str = Field(
        "", max_length=1024, description="Audience that tokens must be for (one of their claim aud)."
    )
    jwt_jwks: str = Field(
        "",
        max_length=4096,
        description="File or https URL with the issuer's public keys, a JSON Web Key Set. A file is read again every 5 s,"
        " a URL every 5 min, and both when a token names an unknown key, for which a request waits 5 s at most.",
    )
    jwt_tenant_claim: str = Field(
        "tenant",
        min_length=1,
        max_length=256,
        description="Claim of a token that names its tenant, as in the tenants file: an organisation or organisation/user.",
    )


class GatewaySettings(JwtOptions, BatchOptions, ClientSettings):
    """Serve the OpenAI HTTP API."""

    section = "gateway"
    panels: ClassVar[Panels] = {
        "HTTP": "host port cors_origins allowed_hosts trusted_proxies access_log api_metrics",
        "Tenants": "api_keys tenants jwt_issuer jwt_audience jwt_jwks jwt_tenant_claim",
        "Model": "model model_id more_models served_model_name generation_config default_max_tokens",
        "Cluster": "coordinator tokens_bind advertise drain_timeout_s",
        "Streams and answers": "responses_keep_s database batch_db batch_keep_days",
        "Traces": "otlp_endpoint trace_sample",
        "Expert options": "body_bytes_max client_timeout_ms stream_idle_ms batch_lines_max batch_tenant_mib",
    }
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
        json_schema_extra={"aliases": ["--api-key"]},
    )
    tenants: str = Field(
        "",
        description="TOML file with priority classes, tenants, their limits and the hashes of their keys; read again when"
        " it changes and on SIGHUP. Gateways and coordinator must have the same one. Empty: one tenant without limits.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Where temperature, top_p, top_k, min_p and repetition_penalty come from when a request leaves them out;"
        " auto: from the model's generation_config.json as far as it has them, as in vLLM; none: OpenAI's defaults.",
    )
    default_max_tokens: int = Field(
        4096,
        ge=0,
        le=1 << 20,
        description="Most tokens of a chat answer where the request does not say, cut to what the context leaves; 0: all that"
        " it leaves. Such a request reserves KV room for so many (see --kv-overcommit), so that more means fewer at once.",
    )
    more_models: CommaList = Field(
        default_factory=list,
        description="More models that this gateway serves, separated by commas: folders or ORG/NAME, each perhaps with its id"
        " in front, like small=/models/small. Their workers connect to the same coordinator, with that id.",
    )
    served_model_name: CommaList = Field(
        default_factory=list,
        description="More names by which clients may ask for --model, separated by commas. Answers carry the model id.",
    )
    cors_origins: CommaList = Field(
        default_factory=list,
        description="Origins of web pages that may call this API from a browser, separated by commas, like"
        " https://chat.example.org; *: all. Empty: none may.",
    )
    allowed_hosts: HostNames = Field(
        default_factory=list,
        description="Where no API key is needed: more names by which clients may ask for it (Host header), besides addresses,"
        " localhost and --host; *: any, so that a web page can reach it by a name of its own.",
    )
    trusted_proxies: Networks = Field(
        default_factory=list,
        description="Reverse proxies, like 10.0.0.5,10.1.0.0/16: X-Forwarded-For of no others says whose client a request is.",
    )
    responses_keep_s: float = Field(
        3600.0,
        ge=0,
        le=86_400.0 * 30,
        description="Seconds for which answers of /v1/responses are kept, for previous_response_id, in this gateway's memory"
        " or in --database; 0: none is. At most 4096 and 64 MiB are kept, and a quarter of these for one tenant.",
    )
    database: str = Field(
        "",
        max_length=4096,
        description="PostgreSQL that keeps answers of /v1/responses, files and batches, so that any gateway finds them, also"
        " after a restart; as postgresql://USER@HOST/NAME, without a password: PGPASSWORD or a passfile has it. It may be the"
        " coordinators'. It takes the place of --batch-db; its gateways serve the same models, unless --batch-db is off.",
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
    stream_idle_ms: int = Field(
        120_000,
        ge=100,
        le=86_400_000,
        description="Milliseconds without a token after which a stream counts as stuck and is failed. It spans the wait"
        " for the first token, so it bounds queueing and prefill too.",
    )
    access_log: bool = Field(
        True,
        description="Log one line for each HTTP request, at the level info (probes: debug): method, path, status, tenant,"
        " request id, tokens and times. Never prompts or keys.",
    )
    otlp_endpoint: str = Field(
        "",
        max_length=512,
        pattern=r"^(https?://.+)?\z",
        description="URL of an OpenTelemetry collector that takes OTLP over HTTP, like http://localhost:4318; needs"
        " crossdock[tracing]. Empty: what OTEL_EXPORTER_OTLP_ENDPOINT says; without either, nothing is traced.",
    )
    trace_sample: float = Field(
        0.01,
        ge=0.0,
        le=1.0,
        description="Part of the requests that is traced. A client that sends traceparent decides for its own. Requests that"
        " fail, are resumed, or miss their target for the first token are always traced.",
    )
    api_metrics: bool = Field(
        True,
        description="Serve this gateway's metrics at /metrics of --port, too, where benchmarks look for them. Never if"
        " --tenants names tenants, since the metrics name them, too.",
    )

    @property
    def other_models(self) -> list[tuple[str, str]]:
        """(id, folder or ORG/NAME) of each of `more_models`."""
        split = (one.rpartition("=") for one in self.more_models)
        return [(model_id_of(path, name), path) for name, _, path in split]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.database:
            check_database("--database", self.database)
            if self.batch_db not in BATCHES_OFF:
                raise ValueError("--database: takes the place of --batch-db; leave it out")
        names = [self.served_model_id, *self.served_model_name, *(name for name, _ in self.other_models)]
        if len(set(names)) < len(names):
            raise ValueError("--more-models, --served-model-name: two models have the same name")
        if any(of_tokens := (self.jwt_issuer, self.jwt_audience, self.jwt_jwks)) and not all(
            (*of_tokens, self.tenants)
        ):
            raise ValueError("--jwt-issuer: tokens need --jwt-issuer, --jwt-audience, --jwt-jwks and --tenants")
        if self.jwt_jwks.startswith("http://"):
            raise ValueError(f"--jwt-jwks: {self.jwt_jwks} must be a file or an https URL")
        self._check_reachable("--tokens-bind", self.tokens_bind)
        return self
