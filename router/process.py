"""One router process's parts: what it starts, watches, drains and stops."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from random import SystemRandom

import baton
from baton.background import OnFault, start_background
from baton.clock import SystemClock
from baton.config import RouterConfig
from baton.config.kinds import parts_of
from baton.config.setting import settings_for
from baton.errors import BackgroundFault
from baton.messages.generation import ModelCard
from baton.messages.ids import new_incarnation
from baton.messages.node_model import Capability
from baton.model_formats.audio import AudioLimits
from baton.node.name_claim import Asks, require_first, start_number
from baton.observe.metrics import declared_figures, render
from baton.observe.process_figures import process_figures
from baton.observe.start_tracing import start_tracing
from baton.registry import Lease, Membership, NodeRecord
from baton.registry.base import FlightRecords
from baton.registry.quotas import QuotaStore
from baton.security.connection_limit import ConnectionLimit
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing
from baton.security.matrix import CallerRole
from baton.text.bounded_workers import BoundedWorkers
from baton.text.constraint_checker import ConstraintChecker
from baton.text.model_template import ModelTemplate, RequestTemplate
from baton.text.prompts import ImagePrompts, SpeechPrompts
from baton.text.tokenizer import Tokenizer
from baton.wire.authenticator import Authenticator
from baton.wire.clients.node_client import NodeClient
from baton.wire.credentials import Dialer
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer, join_address, reached_as, streaming_server
from baton.wire.services import generation_service, operator_service
from baton.wire.services.generation_service import GenerationServicer
from baton.wire.services.operator_service import OperatorServicer
from baton.wire.turn_budget import TurnBudget
from router.admission.bounded_work import BoundedWork
from router.admission.limits import DispatchLimits
from router.admission.prompt_inputs import ImageRules
from router.admission.quotas import RateLimiter
from router.admission.tenants import Tenants
from router.cards import CurrentCard, card_without_nodes
from router.dispatcher import Dispatcher
from router.flight.flight_record import FlightJournal
from router.flight.timeline import RequestSpans
from router.front import GenerationHandler
from router.http.app import HttpFront, with_cors
from router.http.audio.endpoint import SpeechRules
from router.http.image_urls import ImageFetcher
from router.http.json_body import base64_bytes
from router.http.model import ServedModel
from router.http.pages.html import LiveData, live_pages
from router.http.pages.status import adapter_routes
from router.http.parsed_text import AnswerParsers
from router.http.responses.store import ResponseStore, StoreBounds
from router.http.server import HttpServer
from router.node_links import LinkTimes, NodeLinks
from router.operations.adapters import ClusterAdapters
from router.operations.cluster_events import EventRing
from router.operations.idle_collector import CONNECTIONS_LIKE_A_REQUEST, IdleCollector
from router.operations.live_history import SAMPLE_EVERY_S, LiveHistory, LiveTotals, buckets_of, router_totals
from router.operations.live_page import MAX_REMEMBERED, MAX_RUNNING, MAX_TENANTS, live_page_data
from router.operations.metrics import connection_figures, figures
from router.operations.operator_handler import OperatorHandler
from router.operations.planning import PlannerMode, Planning, planner_of
from router.operations.steering import Steering
from router.placement.cost_model import ServiceLevel
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.room import RoomRules
from router.placement.view import ClusterView
from router.planner.size import SizeSettings
from router.scalers.choice import scaler_of
from router.stream_moves import StreamMoves
from router.timers import LoopTimers, first_of, sleep_until

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """The addresses of a router, and the incarnation that serves them."""

    incarnation: str
    grpc: str
    operator: str
    http: str = ""


@dataclass(frozen=True, slots=True)
class RouterModel:
    """What a router knows of its model by the model directory. Simulated nodes have none, and take token ids only."""

    card: ModelCard
    codec: Tokenizer | None = None
    template: ModelTemplate | None = None
    images: ImagePrompts | None = None
    """None: the model takes no images."""
    speech: SpeechPrompts | None = None
    """None: it does not write down speech."""

    @classmethod
    def load(cls, config: RouterConfig) -> RouterModel:
        """Read the model directory. Raises ConfigError."""
        card = card_without_nodes(config)
        if config.runner == "simulated":
            return cls(card)
        codec = Tokenizer.load(config.model)
        template, images = ModelTemplate.load(config.model), ImagePrompts.load(config.model)
        return cls(card, codec, template, images, SpeechPrompts.load(config.model, codec.tokens()))


class _PromptInputs:
    """What this router takes in prompts beside text, and within which bounds."""

    def __init__(self, config: RouterConfig, model: RouterModel) -> None:
        takes_rows = config.allow_prompt_embeds == "on"
        takes_images = model.images is not None and config.max_images > 0
        self.embeds_bytes = config.max_prompt_embeds if takes_rows else 0
        self.images: ImageRules | None = None
        if model.images is not None:
            bounds = config.max_images, config.max_image_bytes, config.max_image_pixels
            self.images = ImageRules(model.images, *bounds)
        self.fetcher: ImageFetcher | None = None
        if takes_images and (prefixes := parts_of(config.image_urls)):
            self.fetcher = ImageFetcher(prefixes, config.max_images, config.max_image_bytes)
        self.origins = parts_of(config.cors_origins)
        self.speech: SpeechRules | None = None
        if model.speech is not None and config.max_audio_seconds > 0:
            limits = AudioLimits(config.max_audio_bytes, config.max_audio_seconds)
            self.speech = SpeechRules(model.speech, limits, self.origins)
        allowed = {
            Capability.PROMPT_EMBEDS: takes_rows,
            Capability.IMAGE: takes_images,
            Capability.TRANSCRIBE: self.speech is not None,
            Capability.ALIGN: self.speech is not None,
        }
        self.not_allowed = frozenset(kind for kind, is_allowed in allowed.items() if not is_allowed)

    @property
    def images_bytes(self) -> int:
        """The most bytes of a request's images."""
        return self.images.most_bytes if self.images is not None else 0

    @property
    def body_bytes(self) -> int:
        """The most bytes of these inputs in the body of an HTTP request."""
        audio = self.speech.limits.most_bytes if self.speech is not None else 0
        return max(base64_bytes(max(self.embeds_bytes, self.images_bytes)), audio)


class _Core:
    """Serves requests, without any port: the view of the cluster, the links to nodes, and the dispatcher."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        records: FlightRecords | None,
        model: RouterModel,
        inputs: _PromptInputs,
    ) -> None:
        self.rng, self.clock, self.timers = SystemRandom(), SystemClock(), LoopTimers()
        self.membership = membership
        self.model = model
        self.name = config.router_id
        self.incarnation = new_incarnation(config.router_id, self.rng)
        self.tls = config.tls.live() if config.tls is not None else None
        self.keys = KeyRing(config.api_keys) if config.api_keys is not None else None
        self.tracer = start_tracing(os.environ, "router", config.router_id, self.incarnation)
        self.connect = partial(NodeClient, dialer=Dialer.to_role(CallerRole.NODE, config.cluster, self.tls))
        settings, rules = placement_settings(config), RoomRules(**settings_for(RoomRules, config))
        self.view = ClusterView(
            self.timers.monotonic, rules, needs_pairs=settings.require_disaggregation, across=settings.across
        )
        self.placer = Placer(settings)
        self.links = NodeLinks(self.connect, config.router_id, self.timers, self.rng, LinkTimes(), self.incarnation)
        self.cards = CurrentCard(model.card, self.view, self.timers.monotonic, inputs.not_allowed)
        self.limits = DispatchLimits(**settings_for(DispatchLimits, config), prompt_embeds_bytes=inputs.embeds_bytes)
        self.workers = BoundedWorkers()
        self.dispatcher = Dispatcher(
            self.view,
            self.links,
            model.codec,
            self.cards,
            self.timers,
            self.rng,
            self.limits,
            FlightJournal(records, self.incarnation, self.clock.wall) if records is not None else None,
            self.placer,
            RequestSpans(self.tracer) if self.tracer is not None else None,
            BoundedWork(ConstraintChecker(self.workers), model.template),
            inputs.images,
        )
        self.requests = self.dispatcher.requests


class _Operators:
    """The side for operators: their commands and their port, events, and the figures of the live page."""

    def __init__(self, config: RouterConfig, core: _Core, own: Callable[[], NodeRecord]) -> None:
        """`own` returns the router's record as it is now."""
        self._core = core
        self._own = own
        requests, view, timers = core.requests, core.view, core.timers
        self.events = EventRing(core.incarnation, core.clock.wall)
        requests.on_retry.add(self._retried)
        self.steering = Steering(
            view, core.membership, core.placer, timers, self.events, core.connect, core.model.card.name
        )
        self.adapters = ClusterAdapters(
            core.model.card.name,
            requests,
            view,
            core.links,
            timers,
            self.events,
            core.connect,
            self.steering.write,
            core.cards.set_adapters,
        )
        self.steering.on_desired.add(self.adapters.take_desired)
        self.moves = StreamMoves(requests, view, timers, is_on=config.move_streams == "on")
        self.planning = Planning(
            mode := PlannerMode(config.planner),
            core.incarnation,
            view,
            requests,
            core.membership,
            self.steering,
            timers,
            self.events,
            planner_of(
                mode,
                config.goal_attainment,
                SizeSettings(config.min_nodes, config.max_nodes or None),
                config.max_encode_nodes or None,
            ),
            scaler=scaler_of(config.scaler, config.cluster, os.environ) if config.scaler else None,
        )
        self.handler = OperatorHandler(view, core.dispatcher, core.membership, core.clock, own, self.planning.report)
        served = requests.counters.served
        own_totals = partial(router_totals, requests, core.name, core.incarnation)
        history = LiveHistory(buckets_of(served.ttft, served.gaps))
        self.totals = LiveTotals(core.membership, timers, core.clock.wall, own_totals, history, requests.exchange)
        self.totals.on_totals.add(self.planning.take_totals)
        # With TLS an operator has a certificate, otherwise a key.
        callers = Authenticator(core.keys) if core.tls is None else Authenticator(cluster=config.cluster)
        barrier = FaultBarrier(authenticator=callers)
        self.server = RpcServer((operator_service.SERVICE_NAME,), barrier, core.tls, asks_certificates=True)
        OperatorServicer(self.handler, self.steering, self.adapters, self.moves).add_to_server(self.server.server)

    def take_routers(self, routers: Sequence[NodeRecord]) -> None:
        """Take the routers that are in the registry now."""
        self.handler.registered_routers(routers)
        self.totals.registered_routers(record.incarnation for record in routers)
        self.steering.registered_routers({record.incarnation: record.name for record in routers})

    def picture(self) -> bytes:
        """The data of the live page, as JSON."""
        handler, own = self.handler, self._own()
        data = live_page_data(
            handler.status(),
            own.model,
            self.totals.history,
            handler.running(MAX_RUNNING),
            self._core.requests.num_live,
            handler.ended(MAX_REMEMBERED),
            self.events.after(0),
            own.name,
            self._core.requests.tenant_rows(MAX_TENANTS),
        )
        return json.dumps(data, separators=(",", ":")).encode()

    def _retried(self, request_id: str, attempt: int, cause: str) -> None:
        self.events.record("Failover", request_id=request_id, detail=f"attempt {attempt}: {cause}")


class _PublicPorts:
    """The ports for clients, gRPC and HTTP."""

    def __init__(
        self,
        config: RouterConfig,
        core: _Core,
        inputs: _PromptInputs,
        operators: _Operators,
        why_not_ready: Callable[[], str],
        quotas: QuotaStore | None,
    ) -> None:
        self._core = core
        self._planning = operators.planning
        self._moves = operators.moves
        # Shared by both.
        self.connections = limit = ConnectionLimit()
        budget = TurnBudget(asyncio.get_running_loop())
        services, barrier = (generation_service.SERVICE_NAME,), FaultBarrier(authenticator=Authenticator(core.keys))
        if config.grpc_server == "own":
            self.grpc = streaming_server(services, barrier, config.tls, limit, budget)
        else:
            self.grpc = RpcServer(services, barrier, core.tls)
        limiter = RateLimiter(quotas, core.clock, core.incarnation)
        self._tenants = Tenants(labels=core.requests.tenants.labels, limiter=limiter)
        self._responses = ResponseStore(StoreBounds(**settings_for(StoreBounds, config)), core.clock)
        codec, template = core.model.codec, core.model.template
        handler = GenerationHandler(core.dispatcher, codec, core.cards, self._tenants)
        servicer = GenerationServicer(
            handler,
            takes_traces=core.tracer is not None,
            prompt_embeds_bytes=inputs.embeds_bytes,
            images_bytes=inputs.images_bytes,
        )
        servicer.add_to_server(self.grpc.server)
        request_template, parsers = None, None
        if template is not None:
            parsers = AnswerParsers.of(config.tool_call_parser, config.reasoning_parser, template)
            if config.trust_request_chat_template == "on":
                request_template = partial(RequestTemplate, core.workers, template.special_tokens)
        served = ServedModel(
            core.cards, codec, template, datetime.now, request_template, parsers, inputs.images, inputs.fetcher
        )
        live = LiveData(operators.picture, core.clock, SAMPLE_EVERY_S)
        front = HttpFront(
            handler,
            served,
            why_not_ready,
            self._metrics,
            core.clock,
            core.rng,
            self._responses,
            authenticator=PageAuthenticator(config.host, config.allowed_hosts, core.keys),
            more_routes=[*adapter_routes(lambda: operators.adapters), *live_pages(live)],
            prompt_embeds_bytes=inputs.embeds_bytes,
            speech=inputs.speech,
        )
        self.http = HttpServer(
            with_cors(front, inputs.origins),
            core.limits.stall_s,
            config.tls,
            limit=limit,
            budget=budget,
            more_body_bytes=inputs.body_bytes,
        )

    def _metrics(self) -> bytes:
        core = self._core
        labels = {"model_name": core.model.card.name, "node": core.name, "role": "router"}
        metrics = figures(core.requests, core.view, core.timers.monotonic(), core.clock.wall())
        held = connection_figures(self.grpc, self.http, self.connections)
        stored = declared_figures(self._responses.stats())
        by_tenant = [*self._tenants.figures(), *core.requests.tenants.figures()]
        planned = [*self._planning.figures(), *self._moves.figures()]
        return render([*metrics, *by_tenant, *planned, *stored, *held, *process_figures()], labels)


class RouterProcess:
    """One running router."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        records: FlightRecords | None,
        model: RouterModel,
        asks: Asks,
        quotas: QuotaStore | None = None,
    ) -> None:
        """`asks`: finds out which router answers at an address, if another one of this name starts, too.

        `quotas`: where quotas are kept; None: in this process.
        """
        self._config = config
        self._membership = membership
        self._asks = asks
        inputs = _PromptInputs(config, model)
        self._core = core = _Core(config, membership, records, model, inputs)
        self._dispatcher, self._requests = core.dispatcher, core.requests
        self._operators = _Operators(config, core, lambda: self._record)
        self._public = _PublicPorts(config, core, inputs, self._operators, self._why_not_ready, quotas)
        host = config.advertise_host or reached_as(config.host)
        grpc, operator, http = (
            join_address(host, server.bind(config.host, port))
            for server, port in (
                (self._public.grpc, config.grpc_port),
                (self._operators.server, config.operator_port),
                (self._public.http, config.http_port),
            )
        )
        self._record = NodeRecord(
            name=config.router_id,
            role="router",
            incarnation=core.incarnation,
            address=grpc,
            operator_address=operator,
            http_address=http,
            pid=os.getpid(),
            version=baton.__version__,
            started_at=core.clock.wall(),
            lease_s=config.lease_s,
            model=model.card.name,
        )
        self._collector = IdleCollector(core.timers, self._num_like_requests)
        self._lease: Lease | None = None
        self._is_draining = False
        self._awaited = asyncio.Event()
        """Set when as many nodes have joined as `await_nodes` wants."""

    async def run(
        self, ready: Callable[[RouterAddresses], None], stop: asyncio.Event, fault: asyncio.Future[BackgroundFault]
    ) -> None:
        """Serve until `stop` is set, then drain. Raises `fault` as soon as it is set."""
        record = self._record
        works = {
            "router-watch": self._watch,
            "router-health": self._publish_health,
            "router-steering": self._operators.steering.watch,
            "router-look": self._operators.steering.check_periodically,
            "router-adapters": self._follow_adapters,
            "router-moves": self._operators.moves.run,
        }
        background = {kind: start_background(work, kind, on_fault=OnFault.END_PROCESS) for kind, work in works.items()}
        # The live page needs them, and the shares of tenants that use several routers.
        background["router-totals"] = start_background(
            self._operators.totals.run, "router-totals", on_fault=OnFault.RESTART
        )
        background["router-planner"] = start_background(
            self._operators.planning.run, "router-planner", on_fault=OnFault.RESTART, may_end=True
        )
        stopping = asyncio.create_task(stop.wait(), name="router-stop")
        awaited = asyncio.create_task(self._awaited.wait(), name="router-awaited")
        try:
            await self._public.grpc.start()
            await self._operators.server.start()
            await self._public.http.start()
            await self._operators.server.set_ready(True)
            # Nodes may have joined while the servers started, which report "not ready" at their start.
            self._requests.changed.set()
            number = await start_number(self._membership, record.name)
            self._record = record = replace(record, start_number=number)
            self._lease = await self._membership.lease(record)
            await require_first(self._membership, record, self._asks)
            await asyncio.wait((awaited, stopping, fault), return_when=asyncio.FIRST_COMPLETED)
            if awaited.done():
                addresses = (record.address, record.operator_address, record.http_address)
                ready(RouterAddresses(record.incarnation, *addresses))
            await asyncio.wait((stopping, fault), return_when=asyncio.FIRST_COMPLETED)
            if fault.done():
                raise fault.result()
            await self._drain(background["router-health"])
        finally:
            tasks = (*background.values(), stopping, awaited)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._operators.steering.close()
            await self._shut_down()

    async def _watch(self) -> None:
        async for snapshot in self._membership.watch():
            nodes = [record for record in snapshot.values() if record.role != "router"]
            self._core.view.registered(nodes)
            self._core.links.update(nodes)
            self._operators.take_routers([record for record in snapshot.values() if record.role == "router"])
            self._operators.steering.check_cluster()

    async def _follow_adapters(self) -> None:
        config, changed = self._config, self._requests.changed
        await self._operators.adapters.run(config.adapter_modules, config.await_nodes, changed.set)

    async def _publish_health(self) -> None:
        while True:
            await self._requests.changed.wait()
            self._requests.changed.clear()
            await self._public.grpc.set_ready(not self._why_not_ready())
            self._operators.steering.check_cluster()
            # Nodes that take no requests at present count, too.
            has_nodes = self._core.view.num_attached >= self._config.await_nodes
            if has_nodes and self._operators.adapters.is_settled:
                self._awaited.set()

    async def _drain(self, health: asyncio.Task[None]) -> None:
        """Refuse new requests, and wait until the running ones have ended, at most `drain_s`."""
        health.cancel()
        self._is_draining = True
        self._dispatcher.drain()
        await self._public.grpc.set_ready(False)
        self._record = replace(self._record, state="draining")
        timers = self._core.timers
        until = timers.monotonic() + self._config.drain_s
        if self._lease is not None and self._requests.num_live:
            await self._lease.update(self._record)
        await first_of(self._dispatcher.idle(), sleep_until(timers, until))

    def _why_not_ready(self) -> str:
        if self._is_draining:
            return "this router is shutting down"
        return self._core.placer.why_not_ready(self._core.view.candidates(), self._core.model.card.name)

    def _num_like_requests(self) -> int:
        """Live requests, and open connections as far as they keep the collector as busy."""
        return self._requests.num_live + self._public.connections.num_open // CONNECTIONS_LIKE_A_REQUEST

    async def _shut_down(self) -> None:
        if num_live := self._requests.num_live:
            _log.info("%d requests have not ended in time and are left to other routers", num_live)
        self._dispatcher.leave_all_to_other_routers()
        self._collector.close()
        await asyncio.gather(self._public.grpc.stop(2.0), self._public.http.stop(2.0), self._operators.server.stop(0.5))
        await self._core.links.close()
        await asyncio.to_thread(self._dispatcher.close)
        if self._lease is not None:
            await self._lease.close()
        if self._core.tracer is not None:
            await asyncio.to_thread(self._core.tracer.close)


def placement_settings(config: RouterConfig) -> PlacementSettings:
    most, first, each = config.max_local_prefill_tokens, config.default_ttft_ms, config.default_tpot_ms
    return PlacementSettings(
        Policy(config.placement),
        config.require_disaggregation == "on",
        None if most == "auto" else most,
        ServiceLevel(first or math.inf, each or math.inf),
        config.kv_pulls,
        config.pair_across_numerics,
    )
