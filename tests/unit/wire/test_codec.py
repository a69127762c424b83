"""Every message survives the wire unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import BatonError, InvalidRequest, TransferCause
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    Path,
    PromptEmbeds,
    SequenceFinished,
)
from baton.messages.ids import AttemptKey, Peer
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVCacheUpdate
from baton.messages.node import (
    Abort,
    Adopt,
    Leg,
    LoadReport,
    NodeDescription,
    Outcome,
    RequestDelta,
    Role,
    RouterMessage,
    StageTimings,
    StepFigures,
    StepReport,
    Submit,
    WatchKVCache,
)
from baton.messages.node_model import GENERATES_AND_EMBEDS
from baton.messages.node_report import (
    ComputePath,
    EndedHandoffs,
    FailedProbe,
    HandoffReport,
    HandoffSide,
    NodeReport,
    OpenHandoff,
    ProbeFault,
    RankReport,
    RefusedLink,
    TraceEvent,
)
from baton.messages.pooling import EmbedInput, EmbedRequest, EmbedTask, Pooling, PoolingParams
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import RepetitionDetection, SamplingParams, TokenLogprobs
from baton.messages.spans import ContentKind, EncoderContent, Span
from baton.messages.speculation import DraftCounts
from baton.v1 import generation_pb2, node_pb2
from baton.wire.codec import generation as codec_generation
from baton.wire.codec import node as codec_node
from baton.wire.codec import sampling as codec_sampling

KEY = AttemptKey("req-1", 2, 2**63 + 5)
PARAMS = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.125,
    top_n_sigma=1.5,
    seed=2**64 - 1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.25,
    logit_bias={3: -1.5},
    allowed_token_ids=(4, 2**31),
    bad_words_token_ids=((1, 2), (3,)),
    prompt_logprobs=0,
    logprobs=0,
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=frozenset({4, 5}),
    ignore_eos=True,
    n=3,
    beam_width=4,
    length_penalty=0.5,
    early_stopping=True,
    json_schema='{"enum": ["ü"]}',
    repetition_detection=RepetitionDetection(9, 2, 5),
)
LOGPROBS = TokenLogprobs(5, -0.5, 1, [(5, -0.5), (6, -1.5)])


def test_sampling_params_are_decoded_with_every_field() -> None:
    assert codec_sampling.SAMPLING_PARAMS.from_pb(codec_sampling.SAMPLING_PARAMS.to_pb(PARAMS)) == PARAMS


def test_absent_log_probabilities_stay_absent() -> None:
    params = SamplingParams(logprobs=None)
    assert codec_sampling.SAMPLING_PARAMS.from_pb(codec_sampling.SAMPLING_PARAMS.to_pb(params)).logprobs is None


@pytest.mark.parametrize(
    "message",
    [
        Submit(KEY, Leg.WHOLE, RequestSpec([1, 2, 3], PARAMS)),
        Submit(
            KEY,
            Leg.DECODE,
            RequestSpec([1], PARAMS, priority=-3, cache_salt="salt"),
            kv_source=Peer("p0", "p0.abc", "127.0.0.1:1"),
        ),
        Abort(KEY, "client is gone"),
        Abort(KEY, "its text is over", 0),
        WatchKVCache(),
        Adopt(KEY),
        Adopt(KEY, 3, (5, 0, 7)),
        Submit(KEY, Leg.WHOLE, RequestSpec([1], PARAMS), output_token_ids=(7, 8)),
        *(Submit(KEY, Leg.WHOLE, RequestSpec([1], PARAMS), turn=turn) for turn in (0.0, -1.5, 2.5)),
        Submit(KEY, Leg.EMBED, RequestSpec([1], PARAMS)),
        Submit(
            KEY,
            Leg.WHOLE,
            RequestSpec(
                [0, 1],
                PARAMS,
                spans=(Span(0, 1, "ab", "float16", b"\0\1"), Span(1, 1, "cd", is_encoded=True, first_row=3, columns=2)),
            ),
        ),
        Submit(
            KEY,
            Leg.WHOLE,
            RequestSpec(
                [0],
                PARAMS,
                contents=(
                    EncoderContent.of(b"a"),
                    EncoderContent("cd", b"b", ContentKind.SPEECH, Peer("p1", "p1.abc", "127.0.0.1:2")),
                ),
            ),
        ),
        *(Submit(KEY, Leg.EMBED, RequestSpec([1], PARAMS, pooling=PoolingParams(kind))) for kind in Pooling),
        Submit(KEY, Leg.EMBED, RequestSpec([1], PARAMS, pooling=PoolingParams(Pooling.CLASSIFY, False, 7, False, 3))),
        Submit(
            KEY,
            Leg.WHOLE,
            RequestSpec([1], PARAMS),
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
    ],
)
def test_router_messages_are_decoded_with_every_field(message: RouterMessage) -> None:
    assert codec_node.router_message_from_pb(codec_node.router_message_to_pb(message)) == message


@pytest.mark.parametrize(
    "request_",
    [
        EmbedRequest([EmbedInput("a", "b"), EmbedInput([1, 2]), EmbedInput(None)]),
        EmbedRequest([], EmbedTask.SCORE, Pooling.CLS, False, 5, False, -1, "id", "m", -2, "s"),
        EmbedRequest([EmbedInput("")], EmbedTask.CLASSIFY, Pooling.MEAN, True, 0, True, 9),
    ],
)
def test_calls_for_vectors_are_decoded_with_every_field(request_: EmbedRequest) -> None:
    pb = codec_generation.embed_request_to_pb(request_)
    assert codec_generation.embed_request_from_pb(type(pb).FromString(pb.SerializeToString())) == request_


def test_unknown_tasks_and_values_that_do_not_fit_are_refused_by_name() -> None:
    for pb, field in (
        (generation_pb2.EmbedRequest(task=9), "task"),  # type: ignore[arg-type]
        (generation_pb2.EmbedRequest(pooling=9), "pooling"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest, match=f"{field}: this version knows no"):
            codec_generation.embed_request_from_pb(pb)
    for wrong in (EmbedRequest([EmbedInput([-1])]), EmbedRequest([], dimensions=-1)):
        with pytest.raises(InvalidRequest):
            codec_generation.embed_request_to_pb(wrong)


def test_an_unknown_router_message_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="message"):
        codec_node.router_message_from_pb(node_pb2.AttachRequest())
    with pytest.raises(InvalidRequest, match=r"Submit\.leg"):
        codec_node.router_message_from_pb(node_pb2.AttachRequest(submit=node_pb2.Submit()))


def test_earlier_versions_and_this_one_tell_each_other_the_field_of_a_refusal() -> None:
    refusal = RequestDelta(KEY, outcome=Outcome.INVALID, error="is: too complex", error_field="json_schema")
    pb = codec_node.report_to_pb(StepReport([refusal], LoadReport()))
    assert pb.deltas[0].error == "json_schema: is: too complex"
    pb.deltas[0].ClearField("error_field")
    assert codec_node.report_from_pb(pb).deltas == [replace(refusal, token_ids=[], logprobs=())]


def test_reports_are_decoded_with_every_field() -> None:
    deltas = [
        RequestDelta(KEY, 3, [7, 8], [LOGPROBS], Outcome.STOP, 8, "", StageTimings(1, 2, 3, 4, 5, 6, 7, 8)),
        RequestDelta(KEY, outcome=Outcome.KV_LOST, error="peer gone"),
        RequestDelta(KEY, outcome=Outcome.INVALID, error="is: too complex", error_field="schemas: x"),
        RequestDelta(KEY, 0, [0]),
        RequestDelta(KEY, 1, [4], [], sequence_index=7),
        *(RequestDelta(KEY, outcome=Outcome.KV_LOST, error="why", transfer_cause=cause) for cause in TransferCause),
    ]
    deltas.append(RequestDelta(KEY, outcome=Outcome.STOP, embedding=b"\0\1\xff\2", draft_counts=DraftCounts(9, 4)))
    load = LoadReport(1, 2, 3, 100, 50, 5, 6, True, uncomputed_tokens=2**33, context_tokens=9)
    report = StepReport(deltas, load, step=StepFigures(1.5, 512, 3, 2**33, 2, 8, 5))
    again = codec_node.report_from_pb(codec_node.report_to_pb(report))
    assert again.step == report.step
    assert again.load == report.load
    assert [d.outcome for d in again.deltas[:5]] == [Outcome.STOP, Outcome.KV_LOST, Outcome.INVALID, None, None]
    assert [d.sequence_index for d in again.deltas[:5]] == [0, 0, 0, 0, 7]
    assert (again.deltas[2].error_field, again.deltas[2].error) == ("schemas: x", "is: too complex")
    assert [d.transfer_cause for d in again.deltas[:-1]] == [None] * 5 + list(TransferCause)
    assert (again.deltas[0].embedding, again.deltas[-1].embedding) == (b"", b"\0\1\xff\2")
    assert again.deltas[0] == RequestDelta(
        KEY, 3, [7, 8], [LOGPROBS], Outcome.STOP, 8, "", StageTimings(1, 2, 3, 4, 5, 6, 7, 8)
    )
    assert again.deltas[3].stop_token_id is None
    assert [delta.draft_counts for delta in again.deltas] == [None] * (len(deltas) - 1) + [DraftCounts(9, 4)]


def test_kv_cache_updates_are_decoded_with_everything_but_tokens() -> None:
    stored = BlockStored((b"a" * 32, b"b" * 32), b"p" * 32, (1, 2, 3), group=2)
    others: list[KVCacheEvent] = [
        BlockStored((b"c" * 32,), tier="host"),
        BlockRemoved((b"a" * 32,), "host"),
        BlockStored((b"d" * 32,), tier="encoder"),
        BlockRemoved((b"b" * 32,)),
        AllBlocksCleared(),
    ]
    for restart in (False, True):
        report = StepReport((), LoadReport(), KVCacheUpdate(2**40, 2**40 + 5, [stored, *others], restart))
        again = codec_node.report_from_pb(codec_node.report_to_pb(report)).kv_cache
        bare = stored._replace(token_ids=())
        assert again == KVCacheUpdate(2**40, 2**40 + 5, [bare, *others], restart)
    assert codec_node.report_from_pb(codec_node.report_to_pb(StepReport((), LoadReport()))).kv_cache is None


def test_unknown_kv_cache_events_of_a_newer_version_are_skipped() -> None:
    unknown = [
        node_pb2.KVCacheEvent(),
        node_pb2.KVCacheEvent(block_stored=node_pb2.BlockStored(block_hashes=[b"x"])),
        node_pb2.KVCacheEvent(block_removed=node_pb2.BlockRemoved(block_hashes=[b"x"])),
    ]
    pb = node_pb2.StepReport(kv_cache=node_pb2.KVCacheUpdate(first_sequence=1, next_sequence=4, events=unknown))
    assert codec_node.report_from_pb(pb).kv_cache == KVCacheUpdate(1, 4, [])


def test_an_unknown_outcome_of_a_newer_version_is_an_error() -> None:
    pb = node_pb2.StepReport(deltas=[node_pb2.RequestDelta(outcome=99)])  # type: ignore[arg-type]
    assert codec_node.report_from_pb(pb).deltas[0].outcome is Outcome.ERROR


def test_descriptions_and_traces_are_decoded_with_every_field() -> None:
    description = NodeDescription(
        *("p0", "p0.x", Role.PREFILL, "h:1", 7, "0.1", "m", "f", "bfloat16", "n", True, 10, 20, 16, 5, frozenset({1})),
        *("fail", "kv", 2**40, 64, 512, 4, 4096),
        capabilities=GENERATES_AND_EMBEDS,
        row_width=64,
    )
    assert codec_node.NODE_DESCRIPTION.from_pb(codec_node.NODE_DESCRIPTION.to_pb(description)) == description
    event = TraceEvent(1, 2**60, "offered", KEY, -5, "story")
    assert codec_node.TRACE_EVENT.from_pb(codec_node.TRACE_EVENT.to_pb(event)) == event


def test_node_reports_are_decoded_with_every_field() -> None:
    description = NodeDescription(
        "p0", "p0.x", Role.PREFILL, "h:1", 7, "0.1", "m", "f", "bfloat16", "n", True, 10, 20, 16, 5, frozenset({1})
    )
    handoffs = (
        OpenHandoff(KEY, HandoffSide.SENDER, "READING", "d0", "d0.x", 2**20, 0.125),
        OpenHandoff(KEY, HandoffSide.READER, "QUARANTINED", "p1", "p1.x", 1, 1e6),
    )
    ended = (EndedHandoffs("p1", "arrived", 2**40),)
    refused = (RefusedLink("p2", "layout_mismatch", "p2 [a], d0 [b]", 0.5, 3),)
    failed = tuple([FailedProbe("p3", fault, "other bytes arrived", 0.25, 2) for fault in ProbeFault])
    report = NodeReport(
        description,
        LoadReport(1, 2, 3, 4, 5, 6, 7, True),
        {"capacity": 2, "remote_kv": 1},
        HandoffReport("dtype=float32", handoffs, ended, refused, failed),
        (ComputePath("decoder", "transformers' loop", "it has no part model"), ComputePath("products", "C kernels")),
        (RankReport(0, 7, True, 2**40, 2**30, 1.5, 3), RankReport(1, 8, False)),
    )
    pb = codec_node.NODE_REPORT.to_pb(report)
    assert codec_node.NODE_REPORT.from_pb(pb) == report
    pb.handoff.open[0].side = 99  # type: ignore[assignment]
    assert codec_node.NODE_REPORT.from_pb(pb).handoff.open == handoffs[1:]
    pb.handoff.failed_probes[0].fault = 99  # type: ignore[assignment]
    assert codec_node.NODE_REPORT.from_pb(pb).handoff.failed_probes == failed[1:]


@pytest.mark.parametrize("notice", [None, "", "p2 [a], d0 [b]"])
def test_an_empty_notice_differs_from_an_absent_one(notice: str | None) -> None:
    report = StepReport([], LoadReport(), notice=notice)
    assert codec_node.report_from_pb(codec_node.report_to_pb(report)) == report


def test_requests_are_decoded_with_present_fields_only() -> None:
    bare = GenerateRequest(prompt="hello")
    assert codec_generation.request_from_pb(codec_generation.request_to_pb(bare)) == bare
    full = GenerateRequest(
        prompt=[1, 2],
        request_id="r",
        model="m",
        temperature=0.0,
        top_k=-1,
        seed=0,
        logit_bias={1: 2.0},
        allowed_token_ids=(1, 2),
        bad_words=("a", "ü"),
        prompt_logprobs=0,
        max_tokens=1,
        stop=("a",),
        stop_token_ids=(3,),
        ignore_eos=False,
        include_stop_str_in_output=False,
        logprobs=0,
        n=2,
        best_of=8,
        beam_width=3,
        length_penalty=0.0,
        early_stopping=False,
        json_schema="{}",
        repetition_detection=RepetitionDetection(8, 3, 4),
        priority=-1,
        cache_salt="s",
        prompt_embeds=(PromptEmbeds(b"\0", 0), PromptEmbeds(b"", 7), PromptEmbeds(b"abc")),
    )
    assert codec_generation.request_from_pb(codec_generation.request_to_pb(full)) == full


def test_an_empty_list_of_token_ids_differs_from_an_absent_prompt() -> None:
    assert codec_generation.request_from_pb(codec_generation.request_to_pb(GenerateRequest(prompt=[]))).prompt == []
    assert codec_generation.request_from_pb(generation_pb2.GenerateRequest()).prompt is None


@pytest.mark.parametrize("stop_reason", [None, 0, "END"])
def test_the_final_event_is_decoded_with_every_field(stop_reason: int | str | None) -> None:
    path, counts = Path("p0", "d0", 2, "least loaded"), DraftCounts(9, 4)
    finished = Finished("stop", stop_reason, 1, 2, 3, 4, 5, 6, 7, 8, 9, path, draft_counts=counts)
    pb = codec_generation.event_to_pb(finished, "r")
    assert codec_generation.finished_from_pb(pb.finished, codec_generation.path_to_metadata(finished)) == finished


def test_events_are_decoded_with_every_field() -> None:
    events: list[GenerateEvent] = [
        Accepted("r", 5, 6),
        Chunk(3, [1, 2], "ab", [LOGPROBS]),
        Chunk(0, [1], "a", [], 7),
        SequenceFinished(2, "stop", "END", 5),
        SequenceFinished(0, "stop", 0, 5),
        SequenceFinished(0, "length", None, 1),
    ]
    for event in events:
        assert codec_generation.event_from_pb(codec_generation.event_to_pb(event, "r")) == event
    with pytest.raises(BatonError, match="does not know"):
        codec_generation.event_from_pb(generation_pb2.GenerateResponse())
