"""Checks that need no process to be started. Each error is one line that says what is wrong and how to fix it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.config import UpConfig
from baton.errors import ConfigError
from baton.model_formats.encoder_decoders import read_encoder_decoder
from baton.model_formats.images import IMAGE_FAMILIES, image_family
from baton.runner.backends.cpu import kernel_file
from baton.runner.model.checkpoint import check_model_dir
from baton.runner.model.pooling_files import is_classifier, is_encoder, read_pooling
from baton.security.binds import check_bind
from baton.security.tls_files import certificate_files
from baton.text.model_files import read_model_files


def check_up(config: UpConfig) -> None:
    """Raise ConfigError for an address, certificate, model, port or registry with which the cluster could not start."""
    check_bind(config.host, config.protection, needs_keys=True)
    if config.certs is not None:
        for role in ("router", "node"):
            certificate_files(config.certs, role).read()
    if config.runner == "torch":
        check_architecture(config.model, check_model_dir(config.model))
        read_model_files(config.model)
    check_ports(config)
    if config.registry:
        # The client of Redis takes a fifth of the time of this command's imports.
        from baton.registry.connection import with_authority
        from baton.registry.registry import require_registry

        authority = config.certs / "ca.crt" if config.certs is not None else None
        asyncio.run(require_registry(with_authority(config.registry, authority), config.cluster))


def check_architecture(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless config.json names a language model, with an encoder or without, one with other parts
    such as images, a classifier or an encoder.

    The node checks the details.
    """
    named = config.get("architectures") or []
    if is_encoder(config) or is_classifier(config):
        return
    if read_encoder_decoder(directory, config) is not None:
        return
    if config.get("model_type") in IMAGE_FAMILIES:
        image_family(directory)
        return
    endings = ("ForCausalLM", "LMHeadModel", *(["ForConditionalGeneration"] if config.get("text_config") else []))
    causal = [name for name in named if str(name).endswith(endings)]
    if not causal or config.get("is_encoder_decoder"):
        architectures = ", ".join(map(str, named)) or "no architecture"
        raise ConfigError(
            f"model directory {directory} holds {architectures}, which is not supported: "
            "choose a decoder-only language model (…ForCausalLM), a classifier, or an encoder such as BERT"
        )


def check_ports(config: UpConfig) -> None:
    """Raise ConfigError for a port that another process has, or that two processes of the cluster would take."""
    takers: dict[int, str] = {}
    for flag, first, count in (
        ("--grpc-port", config.grpc_port, config.routers),
        ("--http-port", config.http_port, config.routers),
        ("--metrics-port", config.metrics_port or 0, config.prefill + config.decode),
    ):
        for port in range(first, first + count) if first else ():
            if port in takers:
                raise ConfigError(
                    f"{takers[port]} and {flag} both need port {port} (each further router or node takes the next "
                    f"port): choose another with {flag}, 0 takes free ones"
                )
            takers[port] = flag
            check_port_free(config.host, port, flag)


def check_port_free(host: str, port: int, flag: str) -> None:
    """Raise ConfigError if another process listens on the port, or if the address is not one of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: choose another with {flag}, 0 takes a free one"
            ) from None
        raise ConfigError(
            f"can't listen on {host}:{port} ({error.strerror}): choose another with --host or {flag}"
        ) from None


def without_decode_nodes(config: UpConfig) -> UpConfig:
    """The settings, with prefill nodes in place of decode nodes for a model that generates nothing."""
    if config.runner != "torch" or not config.decode or read_pooling(config.model).generates:
        return config
    return config.model_copy(update={"prefill": config.prefill + config.decode, "decode": 0})


def why_slow(config: UpConfig) -> str:
    """What a person should know before the nodes start: that they have no kernels here; empty if they have."""
    return "" if config.runner != "torch" or config.device.startswith("cuda") else kernel_file.why_slow()
