"""One router process's parts: what it starts, watches, drains and stops."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
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
from baton.messages.capabilities import Capability
from baton.messages.generation import ModelCard
from baton.messages.ids import new_incarnation
from baton.model_formats.audio import AudioLimits
from baton.node.name_claim import Asks, require_first, start_number
from baton.observe.metrics import declared_figures, render
from baton.observe.process_figures import process_figures
from baton.observe.start_tracing import start_tracing
from baton.registry import Lease, Membership, NodeRecord
from baton.registry.flights import FlightRecords
from baton.security.connection_limit import ConnectionLimit
from baton.security.keys import KeyRing
from baton.security.matrix import CallerRole
from baton.security.pages import PageAuthenticator
from baton.text.bounded_workers import BoundedWorkers
from baton.text.constraint_checker import ConstraintChecker
from baton.text.image_prompts import ImagePrompts
from baton.text.model_template import ModelTemplate
from baton.text.request_template import RequestTemplate
from baton.text.speech_prompts import SpeechPrompts
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
from router.admission.images import ImageRules
from router.admission.tenants import Tenants
from router.cards import CurrentCard
from router.dispatcher import Dispatcher
from router.flight.flight_journal import FlightJournal
from router.flight.request_spans import RequestSpans
from router.front import GenerationHandler, OperatorHandler
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
from router.limits import DispatchLimits
from router.node_links import LinkTimes, NodeLinks
from router.operations.adapters import ClusterAdapters
from router.operations.event_ring import EventRing
from router.operations.idle_collector import CONNECTIONS_LIKE_A_REQUEST, IdleCollector
from router.operations.live_history import SAMPLE_EVERY_S, LiveHistory
from router.operations.live_page import MAX_REMEMBERED, MAX_RUNNING, live_page_data
from router.operations.live_totals import LiveTotals, buckets_of, router_totals
from router.operations.metrics import connection_figures, figures
from router.operations.steering import Steering
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.view import ClusterView
from router.timers import LoopTimers, sleep_until

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """The addresses of a router, and the incarnation that serves them."""

    incarnation: str
    grpc: str
    operator: str
    http: str = ""


class RouterProcess:
    """One running router."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        records: FlightRecords | None,
        codec: Tokenizer | None,
        template: ModelTemplate | None,
        card: ModelCard,
        asks: Asks,
        images: ImagePrompts | None = None,
        speech: SpeechPrompts | None = None,
    ) -> None:
        """`asks`: finds out which router answers at an address, if another one of this name starts, too. `images`:
        None: the model takes none. `speech`: None: it does not write down speech.
        """
        rng, clock = SystemRandom(), SystemClock()
        self._config = config
        self._clock = clock
        self._membership = membership
        self._asks = asks
        self._timers = LoopTimers()
        self._view = ClusterView(self._timers.monotonic, needs_pairs=placement_settings(config).require_disaggregation)
        incarnation = new_incarnation(config.router_id, rng)
        tls = config.tls.live() if config.tls is not None else None
        keys = KeyRing(config.api_keys) if config.api_keys is not None else None
        connect = partial(NodeClient, dialer=Dialer.to_role(CallerRole.NODE, config.cluster, tls))
        self._links = NodeLinks(connect, config.router_id, self._timers, rng, LinkTimes(), incarnation)
        takes_rows = config.allow_prompt_embeds == "on"
        takes_images = images is not None and config.max_images > 0
        takes_audio = speech is not None and config.max_audio_seconds > 0
        allowed = {
            Capability.PROMPT_EMBEDS: takes_rows,
            Capability.IMAGE: takes_images,
            Capability.TRANSCRIBE: takes_audio,
            Capability.ALIGN: takes_audio,
        }
        not_allowed = frozenset(one for one, is_allowed in allowed.items() if not is_allowed)
        cards = CurrentCard(card, self._view, self._timers.monotonic, not_allowed)
        journal = FlightJournal(records, incarnation, clock.wall) if records is not None else None
        placer = Placer(placement_settings(config))
        self._tracer = start_tracing(os.environ, "router", config.router_id, incarnation)
        spans = RequestSpans(self._tracer) if self._tracer is not None else None
        embeds_bytes = config.max_prompt_embeds if takes_rows else 0
        rules = None
        if images is not None:
            rules = ImageRules(images, config.max_images, config.max_image_bytes, config.max_image_pixels)
        fetcher = None
        if takes_images and (prefixes := parts_of(config.image_urls)):
            fetcher = ImageFetcher(prefixes, config.max_images, config.max_image_bytes)
        origins = parts_of(config.cors_origins)
        speech_rules = None
        if speech is not None and takes_audio:
            speech_rules = SpeechRules(speech, AudioLimits(config.max_audio_bytes, config.max_audio_seconds), origins)
        limits = DispatchLimits(**settings_for(DispatchLimits, config), prompt_embeds_bytes=embeds_bytes)
        workers = BoundedWorkers()
        work = BoundedWork(ConstraintChecker(workers), template)
        self._dispatcher = Dispatcher(
            self._view, self._links, codec, cards, self._timers, rng, limits, journal, placer, spans, work, rules
        )
        public, barrier = (generation_service.SERVICE_NAME,), FaultBarrier(authenticator=Authenticator(keys))
        # Shared by all public ports.
        self._connections = limit = ConnectionLimit()
        budget = TurnBudget(asyncio.get_running_loop())
        if config.grpc_server == "own":
            self._public = streaming_server(public, barrier, config.tls, limit, budget)
        else:
            self._public = RpcServer(public, barrier, tls)
        # With TLS an operator has a certificate, otherwise a key.
        operators = Authenticator(keys) if tls is None else Authenticator(cluster=config.cluster)
        private = FaultBarrier(authenticator=operators)
        self._private = RpcServer((operator_service.SERVICE_NAME,), private, tls, asks_certificates=True)
        self._tenants = Tenants()
        handler = GenerationHandler(self._dispatcher, codec, cards, self._tenants)
        self._responses = ResponseStore(StoreBounds(**settings_for(StoreBounds, config)), clock)
        own_totals = partial(router_totals, self._dispatcher.requests, config.router_id, incarnation)
        served = self._dispatcher.requests.counters.served
        history = LiveHistory(buckets_of(served.ttft, served.gaps))
        self._totals = LiveTotals(membership, self._timers, clock.wall, own_totals, history)
        live = LiveData(self._picture, clock, SAMPLE_EVERY_S)
        request_template = None
        if template is not None and config.trust_request_chat_template == "on":
            request_template = partial(RequestTemplate, workers, template.special_tokens)
        parsers = None
        if template is not None:
            parsers = AnswerParsers.of(config.tool_call_parser, config.reasoning_parser, template)
        front = HttpFront(
            handler,
            ServedModel(cards, codec, template, datetime.now, request_template, parsers, rules, fetcher),
            self._why_not_ready,
            self._metrics,
            clock,
            rng,
            self._responses,
            authenticator=PageAuthenticator(config.host, config.allowed_hosts, keys),
            more_routes=[*adapter_routes(lambda: self._adapters), *live_pages(live)],
            prompt_embeds_bytes=embeds_bytes,
            speech=speech_rules,
        )
        larger = base64_bytes(max(embeds_bytes, rules.most_bytes if rules is not None else 0))
        self._http = HttpServer(
            with_cors(front, origins),
            limits.stall_s,
            config.tls,
            limit=limit,
            budget=budget,
            more_body_bytes=max(larger, config.max_audio_bytes if takes_audio else 0),
        )
        host = config.advertise_host or reached_as(config.host)
        self._record = NodeRecord(
            name=config.router_id,
            role="router",
            incarnation=incarnation,
            address=join_address(host, self._public.bind(config.host, config.grpc_port)),
            operator_address=join_address(host, self._private.bind(config.host, config.operator_port)),
            http_address=join_address(host, self._http.bind(config.host, config.http_port)),
            pid=os.getpid(),
            version=baton.__version__,
            started_at=clock.wall(),
            lease_s=config.lease_s,
            model=card.name,
        )
        self._events = EventRing(incarnation, clock.wall)
        self._dispatcher.requests.on_retry = self._retried
        self._steering = Steering(self._view, membership, placer, self._timers, self._events, connect, card.name)
        requests = self._dispatcher.requests
        self._adapters = ClusterAdapters(
            card.name,
            self._view,
            self._links,
            self._timers,
            self._events,
            connect,
            self._steering.write,
            cards.set_adapters,
            requests.adapters_in_use,
        )
        self._steering.on_desired = self._adapters.take_desired
        requests.on_node, requests.on_adapters = self._adapters.on_node, self._adapters.on_report
        self._operator = OperatorHandler(self._view, self._dispatcher, membership, clock, self._record)
        servicer = GenerationServicer(
            handler,
            takes_traces=spans is not None,
            prompt_embeds_bytes=embeds_bytes,
            images_bytes=rules.most_bytes if rules is not None else 0,
        )
        servicer.add_to_server(self._public.server)
        OperatorServicer(self._operator, self._steering, self._adapters).add_to_server(self._private.server)

        def num_live() -> int:
            return self._dispatcher.requests.num_live + limit.num_open // CONNECTIONS_LIKE_A_REQUEST

        self._collector = IdleCollector(self._timers, num_live)
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
            "router-steering": self._steering.watch,
            "router-look": self._steering.check_periodically,
            "router-adapters": self._follow_adapters,
        }
        background = {kind: start_background(work, kind, on_fault=OnFault.END_PROCESS) for kind, work in works.items()}
        # Only the live page needs them.
        background["router-totals"] = start_background(self._totals.run, "router-totals", on_fault=OnFault.RESTART)
        stopping = asyncio.create_task(stop.wait(), name="router-stop")
        awaited = asyncio.create_task(self._awaited.wait(), name="router-awaited")
        try:
            await self._public.start()
            await self._private.start()
            await self._http.start()
            await self._private.set_ready(True)
            # Nodes may have joined while the servers started, which report "not ready" at their start.
            self._dispatcher.requests.changed.set()
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
            await self._steering.close()
            await self._shut_down()

    async def _watch(self) -> None:
        async for snapshot in self._membership.watch():
            nodes = [record for record in snapshot.values() if record.role != "router"]
            self._view.registered(nodes)
            self._links.update(nodes)
            routers = [record for record in snapshot.values() if record.role == "router"]
            self._operator.registered_routers(routers)
            self._totals.registered_routers(record.incarnation for record in routers)
            self._steering.registered_routers({record.incarnation: record.name for record in routers})
            self._steering.check_cluster()

    async def _follow_adapters(self) -> None:
        changed = self._dispatcher.requests.changed
        await self._adapters.run(self._config.adapter_modules, self._config.await_nodes, changed.set)

    async def _publish_health(self) -> None:
        while True:
            await self._dispatcher.requests.changed.wait()
            self._dispatcher.requests.changed.clear()
            await self._public.set_ready(not self._why_not_ready())
            self._steering.check_cluster()
            # Nodes that take no requests at present count, too.
            if len(self._view.descriptions()) >= self._config.await_nodes and self._adapters.is_settled:
                self._awaited.set()

    async def _drain(self, health: asyncio.Task[None]) -> None:
        """Refuse new requests, and wait until the running ones have ended, at most `drain_s`."""
        health.cancel()
        self._is_draining = True
        self._dispatcher.drain()
        await self._public.set_ready(False)
        self._record = replace(self._record, state="draining")
        self._operator.own_record(self._record)
        idle = asyncio.create_task(self._dispatcher.idle())
        bound = asyncio.create_task(sleep_until(self._timers, self._timers.monotonic() + self._config.drain_s))
        try:
            if self._lease is not None and self._dispatcher.requests.num_live:
                await self._lease.update(self._record)
            await asyncio.wait((idle, bound), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            bound.cancel()
            await asyncio.gather(idle, bound, return_exceptions=True)

    def _retried(self, request_id: str, attempt: int, cause: str) -> None:
        self._events.record("Failover", request_id=request_id, detail=f"attempt {attempt}: {cause}")

    def _why_not_ready(self) -> str:
        if self._is_draining:
            return "this router is shutting down"
        return self._dispatcher.requests.placer.why_not_ready(self._view.candidates(), self._record.model)

    def _metrics(self) -> bytes:
        labels = {"model_name": self._record.model, "node": self._record.name, "role": "router"}
        found = figures(self._dispatcher.requests, self._view, self._timers.monotonic(), self._clock.wall())
        held = connection_figures(self._public, self._http, self._connections)
        stored = declared_figures(self._responses.stats())
        return render([*found, *self._tenants.figures(), *stored, *held, *process_figures()], labels)

    def _picture(self) -> bytes:
        """The data of the live page, as JSON."""
        requests, operator = self._dispatcher.requests, self._operator
        running, ended = operator.running(MAX_RUNNING), operator.ended(MAX_REMEMBERED)
        data = live_page_data(
            operator.status(),
            self._record.model,
            self._totals.history,
            running,
            requests.num_live,
            ended,
            self._events.after(0),
            self._record.name,
        )
        return json.dumps(data, separators=(",", ":")).encode()

    async def _shut_down(self) -> None:
        if num_live := self._dispatcher.requests.num_live:
            _log.info("%d requests have not ended in time and are left to other routers", num_live)
        self._dispatcher.leave_all_to_other_routers()
        self._collector.stop()
        await asyncio.gather(self._public.stop(2.0), self._http.stop(2.0), self._private.stop(0.5))
        await self._links.close()
        await asyncio.to_thread(self._dispatcher.close)
        if self._lease is not None:
            await self._lease.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def placement_settings(config: RouterConfig) -> PlacementSettings:
    return PlacementSettings(
        Policy(config.placement), config.require_disaggregation == "on", config.max_local_prefill_tokens
    )
