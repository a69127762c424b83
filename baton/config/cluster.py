"""The settings that all processes of a cluster share, and those that each process has for itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

import baton
from baton.config.kinds import AdapterModules, Internal, Name, Seconds, SecondsFromOneToAnHour, parts_of
from baton.security.access import DEFAULT_CLUSTER
from baton.security.binds import Protection
from baton.security.tls_files import TlsFiles


def bundled_model_dir() -> Path:
    """The directory of the model that comes with Baton and is served by default."""
    return Path(baton.__file__).parent / "demo_model"


class Settings(BaseModel):
    """A group of settings. Its fields are the settings that this class adds to those of its base classes.

    If the default is computed when the process starts, the description ends with "Default: ..." and says how.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    heading: ClassVar[str] = ""
    """The title of the group in help and documentation."""


class ClusterSettings(Settings):
    """The settings that all processes of a cluster share."""

    heading: ClassVar[str] = "Every process"

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    cluster: Name = Field(DEFAULT_CLUSTER, min_length=1, description="Name of the cluster in the registry.")
    model: Path = Field(
        default_factory=bundled_model_dir,
        description="Model: a directory, a GGUF file, a model by name (smollm2, all-minilm-l6-v2, whisper-tiny.en), or "
        "ORG/NAME[@REVISION] of the Hugging Face Hub; what is not here yet is fetched once. Routers read the tokenizer "
        "from it. Default: the bundled model.",
    )
    model_name: Name = Field("", description="Name of the model for clients. Default: that of its directory or file.")
    runner: Literal["torch", "simulated"] = Field(
        "torch",
        description="What runs the model. The simulated runner needs no model and computes nothing; its prompts are "
        "token ids only.",
    )
    lora_modules: AdapterModules = Field(
        "",
        description="Adapters (LoRA) that are served from the start, as NAME=DIRECTORY: the name is that for clients, "
        "the directory is on the hosts of the nodes. The flag may be given several times; elsewhere commas separate "
        "them.",
    )
    priority_ageing_s: Seconds = Field(
        60.0,
        description="Seconds of waiting that count as much as one step of priority; 0: waiting does not count.",
    )
    drain_s: Seconds = Field(
        30.0,
        description="Seconds that running requests get to end when a process is stopped, or a node changes its role; "
        "then they continue elsewhere.",
    )
    pair_across_numerics: bool = Field(
        False,
        description="Let nodes with equal weights exchange KV though they compute other bits (a GPU and a CPU, two "
        "architectures), where no pair of equal numerics is left. Such answers depend on their nodes and say "
        "`bit_exact: false`. Only between nodes and routers that all have the setting.",
    )
    api_keys: Path | None = Field(
        None,
        description="File with the hashes of API keys, one of which each caller must show; `baton keys` writes it. "
        "Default: no keys.",
    )
    allowed_hosts: str = Field(
        "",
        description="Host names, separated by commas, under which HTTP clients may call this cluster in addition to "
        "those of loopback; * for any. Default: none if --host is a loopback address, any otherwise.",
    )
    insecure: bool = Field(
        False,
        description="Listen on other addresses than loopback without TLS or keys, in a network that is trusted.",
    )

    @property
    def adapter_modules(self) -> Mapping[str, str]:
        """The directories of `lora_modules`, by name."""
        parts = (part.partition("=") for part in parts_of(self.lora_modules))
        return {name: directory for name, _, directory in parts}

    @property
    def served_model_name(self) -> str:
        """The name under which clients ask for the model."""
        if not self.model_name and self.runner == "simulated" and self.model == bundled_model_dir():
            return "simulated"  # The bundled model is the default, and nothing of it runs.
        return self.model_name or self.model.resolve().name


class ProcessSettings(ClusterSettings):
    """The settings that each node and each router has for itself."""

    heading: ClassVar[str] = "This process"

    registry: str = Field(
        ...,
        min_length=1,
        description="URL of the Redis that is the cluster's registry: redis://, rediss:// or unix://. Set a URL with "
        "a password in BATON_REGISTRY, since other users can read command lines.",
    )
    lease_s: SecondsFromOneToAnHour = Field(5.0, description="Seconds that a crashed process stays in the registry.")
    tls_cert: Path | None = Field(None, description="Certificate of this process, PEM. Default: no TLS.")
    tls_key: Path | None = Field(None, description="Key of the certificate, PEM.")
    tls_ca: Path | None = Field(None, description="Certificate authority of all certificates of this cluster, PEM.")
    notify_fd: Annotated[int | None, Internal] = Field(
        None, ge=3, description="Inherited descriptor that gets one JSON line when the process is ready."
    )

    @property
    def tls(self) -> TlsFiles | None:
        """The three files; None without TLS."""
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def protection(self) -> Protection:
        """The protection of the process against unknown callers."""
        return Protection(self.tls_cert is not None, self.api_keys is not None, self.insecure)

    @model_validator(mode="after")
    def _all_of_tls(self) -> Self:
        TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)
        return self
