"""The settings of routers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ByteSize, Field, model_validator

from baton.config.cluster import ClusterSettings, ProcessSettings
from baton.config.kinds import Count, CountOrZero, Milliseconds, Name, OnOff, Origins, Port, Seconds, Share, UrlPrefixes
from baton.messages.request_limits import (
    MAX_AUDIO_FILE_BYTES,
    MAX_AUDIO_SECONDS,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    MAX_PRIORITY,
    MAX_PROMPT_EMBEDS_BYTES,
    MIN_PRIORITY,
)

MOST_NODES = 4096


class RouterSettings(ClusterSettings):
    """The settings that all routers of a cluster share. `baton up` has a flag for each of them, too."""

    heading: ClassVar[str] = "Every router"

    grpc_port: Port = Field(
        50051,
        description="Port of the public gRPC service; 0: a free one. Further routers of `baton up` take the next "
        "ports.",
    )
    http_port: Port = Field(
        8000,
        description="Port of the OpenAI-compatible HTTP service; 0: a free one. Further routers of `baton up` take the "
        "next ports.",
    )
    max_queue: CountOrZero = Field(
        1024,
        description="Most requests for text, and as many for embeddings, that wait at a router for a free node. When "
        "there are more, the least urgent ones are refused.",
    )
    kv_room: Annotated[float, Field(ge=0.0, le=16.0)] = Field(
        1.0,
        description="Which share of a node's KV cache its requests may need, before more of them wait at the router; "
        "0: any. Above 1 they wait on the node.",
    )
    steps_ahead: Annotated[int, Field(ge=1, le=1024)] = Field(
        4,
        description="For how many steps a node may have tokens of prompts to compute, before more requests wait at the "
        "router.",
    )
    fairness: Literal["tokens", "off"] = Field(
        "tokens",
        description="How waiting requests of several tenants (API keys) get nodes: the one of the tenant that has had "
        "the fewest tokens (tokens), or all by priority and age (off).",
    )
    fair_output_weight: Annotated[float, Field(gt=0.0, le=1000.0)] = Field(
        2.0,
        description="For how many tokens of a prompt a generated token counts in --fairness; more favours tenants with "
        "short answers.",
    )
    urgent_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.5,
        description="Which share of the tokens, and of the queue, requests of API keys of the class urgent get at most "
        "while normal ones wait; 1: all.",
    )
    max_running: Count = Field(
        16_384, description="Most requests of one router that are on nodes at once; more wait at the router."
    )
    min_priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = Field(
        0,
        description="Smallest priority that requests may ask for; smaller ones are refused. 0: no client comes before "
        "requests without a priority. The API keys that `baton keys add --min-priority` makes have one of their own.",
    )
    placement: Literal["cost", "least-loaded", "round-robin"] = Field(
        "cost",
        description="How nodes are chosen for a request: by the lowest predicted cost from speed, load and caches "
        "(cost), by the lowest load (least-loaded), or in turn (round-robin).",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Where temperature, top_p, top_k, min_p and repetition_penalty come from when a request does not "
        "set them: from the model's generation_config.json (auto), or they are off and the temperature is 1 (none).",
    )
    json_extra_keys: Literal["forbid", "allow"] = Field(
        "forbid",
        description="Whether answers may have keys that a JSON schema does not list, where the schema says nothing "
        "about them (additionalProperties); models that may add keys tend not to end.",
    )
    trust_request_chat_template: OnOff = Field(
        "off",
        description="on: a chat may bring a template of its own (chat_template), a program that the router runs within "
        "limits of time and memory; for clients that you trust.",
    )
    allow_prompt_embeds: OnOff = Field(
        "off",
        description="on: prompts may have rows of numbers in place of tokens (prompt_embeds), for models that can; for "
        "clients that you trust with so many bytes.",
    )
    max_prompt_embeds: ByteSize = Field(
        ByteSize(8 << 20),
        gt=0,
        le=MAX_PROMPT_EMBEDS_BYTES,
        description="Most bytes of such rows in one prompt, such as 4MiB; at most 12MiB. The requests of a router have "
        "16 times as many together.",
    )
    max_images: Annotated[int, Field(ge=0, le=MAX_IMAGES)] = Field(
        8, description="Most images in one prompt, for a model that takes images; 0: none are taken."
    )
    max_image_bytes: ByteSize = Field(
        ByteSize(8 << 20),
        gt=0,
        le=MAX_IMAGE_BYTES,
        description="Most bytes of all images of a request, as they are sent, such as 4MiB; at most 12MiB. The "
        "requests of a router have 16 times as many together.",
    )
    max_image_pixels: Count = Field(
        16 << 20,
        le=MAX_IMAGE_PIXELS,
        description="Most pixels of one image, which are decoded on a node: three bytes each.",
    )
    image_urls: UrlPrefixes = Field(
        "",
        description="Beginnings of URLs, such as https://images.example.org/public/, from which the router fetches "
        "images that requests name. The flag may be given several times; elsewhere commas separate them. Default: "
        "none; images come with their requests.",
    )
    logprob_memory: ByteSize = Field(
        ByteSize(256 << 20),
        gt=0,
        description="Most bytes that log-probabilities of all requests of this router may come to, such as 512MiB: 16 "
        "for each token and 8 for each alternative. What needs more is refused.",
    )
    max_audio_bytes: ByteSize = Field(
        ByteSize(25 << 20),
        gt=0,
        le=MAX_AUDIO_FILE_BYTES,
        description="Most bytes of an audio file, such as 10MiB, for a model that writes down speech; at most 512MiB.",
    )
    max_audio_seconds: Annotated[int, Field(ge=0, le=MAX_AUDIO_SECONDS)] = Field(
        1500,
        description="Most seconds of an audio file; 0: none is taken. The calls of a router have 8 times as many "
        "together, 32,000 bytes each.",
    )
    tool_call_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "mistral-args", "smollm2"] = Field(
        "auto",
        description="The format in which the model calls tools; auto: the one that its files name or its chat template "
        "describes; none: chats with tools are refused.",
    )
    reasoning_parser: Literal["auto", "none", "think"] = Field(
        "auto",
        description="Whether reasoning, <think>…</think> at the beginning of an answer, is split off in chats: always "
        "(think), if the model's chat template has these markers (auto), or never (none).",
    )
    max_local_prefill_tokens: CountOrZero | Literal["auto"] = Field(
        "auto",
        description="Most tokens of a prompt that a decode node may compute itself where that is cheaper than a "
        "hand-off; for placement by cost. auto: 512, and any number for requests with a target of their time per "
        "token, as long as the node's streams keep it.",
    )
    kv_pulls: Literal["auto", "always", "off"] = Field(
        "auto",
        description="Whether the node that computes a prompt first pulls the KV of its beginning from another node's "
        "prefix cache: where that is predicted to be quicker than to compute it (auto), always, or never (off); for "
        "placement by cost.",
    )
    move_streams: Literal["on", "off"] = Field(
        "on",
        description="Whether streams are moved to other decode nodes, while they are decoded, from nodes that drain, "
        "change their role or are cordoned, and from a full one while another has much room. Otherwise they end where "
        "they are.",
    )
    default_ttft_ms: Milliseconds = Field(
        0.0,
        description="Time to first token at which placement by cost aims for requests that name none; 0: any. No "
        "request is refused for it.",
    )
    default_tpot_ms: Milliseconds = Field(
        0.0,
        description="Mean time per token after the first at which it aims likewise, also for the streams beside which "
        "a prompt is computed; 0: any.",
    )
    planner: Literal["off", "advise", "on"] = Field(
        "off",
        description="on: nodes change their roles as the load changes, by the decisions of one router of the cluster. "
        "advise: its decisions are events for operators, and no node moves. For placement by cost.",
    )
    goal_attainment: Share = Field(
        0.95,
        description="Share of requests that are to keep their latency targets; while fewer do, the planner counts the "
        "role as busier that makes them miss these.",
    )
    scaler: str = Field(
        "",
        description="Who changes the number of nodes for a planner that decides on it, such as "
        "kubernetes:decode=deployments/NAME or local:RUN_DIR (docs/scaling.md); with `baton up`, local is its own run "
        "directory. Needs --planner and --max-nodes. Default: the number is not changed.",
    )
    min_nodes: Annotated[int, Field(ge=2, le=MOST_NODES)] = Field(
        2, description="Fewest prefill and decode nodes together that a --scaler leaves."
    )
    max_nodes: Annotated[int, Field(ge=0, le=MOST_NODES)] = Field(
        0, description="Most of them that a --scaler starts; 0: it is not set."
    )
    max_encode_nodes: Annotated[int, Field(ge=0, le=MOST_NODES)] = Field(
        0,
        description="Most encode nodes that a --scaler with a pool encode starts; one stays. 0: their number is not "
        "changed.",
    )
    cors_origins: Origins = Field(
        "",
        description="Origins, separated by commas, whose pages may call the HTTP service from a browser, such as "
        "https://chat.example.org; * for any. Default: none but the router's own.",
    )
    require_disaggregation: OnOff = Field(
        "off",
        description="on: no node computes a prompt and also generates from it; requests wait for a pair of nodes.",
    )
    stored_responses: CountOrZero = Field(
        1000,
        description="Most responses of /v1/responses that a router keeps for clients that continue or read them; 0: "
        "none. When there are more, the tenant that has most loses its oldest one.",
    )
    stored_response_memory: ByteSize = Field(
        ByteSize(64 << 20),
        description="Most memory for stored responses and their conversations at a router, such as 64MiB; 0: none are "
        "stored.",
    )
    stored_response_s: Seconds = Field(3600.0, description="Seconds that a router keeps a response.")

    @model_validator(mode="after")
    def _scaling_is_whole(self) -> Self:
        if self.scaler and self.planner == "off":
            raise ValueError("scaler changes the number of nodes for a planner: set planner to on or advise")
        if self.scaler and not self.max_nodes:
            raise ValueError("scaler needs max_nodes: how many nodes it may start")
        if self.max_nodes and not self.scaler:
            raise ValueError(f"max_nodes is {self.max_nodes}, and there is no scaler that could start nodes")
        if self.max_encode_nodes and not self.scaler:
            raise ValueError(
                f"max_encode_nodes is {self.max_encode_nodes}, and there is no scaler that could start nodes"
            )
        if self.max_nodes and self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes {self.max_nodes} is less than min_nodes {self.min_nodes}")
        return self


class RouterConfig(RouterSettings, ProcessSettings):
    """All settings of one router, including those that only `baton router` has."""

    heading: ClassVar[str] = "This router"

    router_id: Name = Field(..., min_length=1, description="Name of the router, unique in the cluster.")
    grpc_server: Literal["own", "grpcio"] = Field(
        "own", description="gRPC server of the public service: Baton's own, or grpcio's, which is several times slower."
    )
    operator_port: Port = Field(0, description="Port of the operator's gRPC service; 0: a free one.")
    advertise_host: str = Field("", description="Host at which others reach the router. Default: where it listens.")
    await_nodes: CountOrZero = Field(
        0, description="Number of nodes that must have joined before the router reports that it is ready."
    )
    flight_record_s: Seconds = Field(
        3600.0,
        description="Seconds that the registry keeps the record of a request, from which another router can continue "
        "it; 0: no records.",
    )
