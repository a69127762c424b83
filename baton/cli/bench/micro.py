"""`baton bench engine`, `handoff`, `router` and `scheduler`: the benchmarks of one part each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton.bench.config import HandoffBenchConfig, RouterBenchConfig, SchedulerBenchConfig
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags
from baton.cli.bench.options import (
    DtypeOption,
    ModelOption,
    ShapeOption,
    chosen_model,
    named_model,
    printed_as_data,
    speculation_callback,
)
from baton.cli.output import Format, OutputOption, print_note, print_table, print_text
from baton.config.kinds import KVCacheDtype
from baton.errors import UsageError
from baton.messages.node_model import NodeShape
from baton.model_formats.adapters import MAX_RANK

if TYPE_CHECKING:
    from baton.bench.micro.engine import EngineReport
    from baton.bench.micro.router import RouterReport
    from baton.bench.results.spread import Spread

_RATIO = {"RATIO": "{.ratio:.2f}", "P10": "{.ratio_p10:.2f}", "P90": "{.ratio_p90:.2f}"}
"""Columns of two ways of computing that were measured by turns."""


def engine(
    model: ModelOption = None,
    shape: ShapeOption = "",
    dtype: DtypeOption = "auto",
    kv_cache_dtype: Annotated[KVCacheDtype, typer.Option(help="Dtype of the KV cache.")] = "auto",
    quantization: Annotated[
        Literal["off", "int8", "int4"], typer.Option(help="Quantise plain weights while they are loaded.")
    ] = "off",
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Make quantised weights plain while they are loaded.")
    ] = False,
    context_tokens: Annotated[int, typer.Option(help="Length of each prompt.", min=16)] = 1024,
    steps: Annotated[int, typer.Option(help="Decode steps at each batch size; medians are shown.", min=6)] = 48,
    speculative: Annotated[
        str,
        typer.Option(
            help='Measure instead what drafts save, such as \'{"method": "ngram"}\' (--speculative-config of nodes).',
            metavar="JSON",
            callback=speculation_callback,
        ),
    ] = "",
    tp: Annotated[
        int, typer.Option(help="Measure instead that many ranks, against one process with as many threads.", min=1)
    ] = 1,
    pp: Annotated[int, typer.Option(help="Measure instead that many stages, of --tp ranks each.", min=1)] = 1,
    adapters: Annotated[
        int, typer.Option(help="Measure instead what that many adapters (LoRA) cost, one for each request.", min=0)
    ] = 0,
    adapter_rank: Annotated[int, typer.Option(help="Rank of these adapters.", min=1, max=MAX_RANK)] = 16,
    threads: Annotated[int | None, typer.Option(help="Threads. Default: all cores.", min=1)] = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Measure the engine, and compare it with the limits of this machine's memory and arithmetic.

    FLOOR is the time to read all weights, and the keys and values of every context, once at memory bandwidth; plain
    reads with the same threads measure the bandwidth before and after each round. SHARE is floor divided by step: 1 is
    the optimum. Prefill is compared with the best matrix product of torch or Baton over several shapes, measured
    before and after each prompt. Run it on an otherwise idle machine.

    With --speculative chats of several kinds are decoded alone, with drafts and without by turns: ACCEPTED is the
    number of tokens that a step with a draft yields, RATIO how many times as fast decoding is. With --tp or --pp the
    model is computed by ranks that share the threads, and by one process that has them all, by turns. With --adapters
    so many requests decode with an adapter each, or all with one, and without any, by turns; --tp and --pp say on how
    many ranks and stages both are computed then.
    """
    from baton.bench.results.host import set_compute_threads, usable_cores

    ranks = NodeShape(tp, pp)
    if speculative and ranks.num_ranks > 1:
        raise UsageError("--speculative excludes --tp and --pp")
    if adapters and speculative:
        raise UsageError("--adapters excludes --speculative")
    count = threads or usable_cores()
    set_compute_threads(count)
    with chosen_model(model, shape) as chosen:
        if speculative:
            from baton.bench.micro.speculation import measure

            settings = {
                "dtype": dtype,
                "kv_cache_dtype": kv_cache_dtype,
                "quantization": quantization,
                "dequantize": chosen.dequantize,
                "speculative_config": speculative,
                "threads": count,
            }
            columns = {
                "TEXT": "{.workload}",
                "TOKENS": "{.num_tokens}",
                "ACCEPTED": "{.acceptance_length:.2f}",
                "TOKENS/S": "{.tokens_per_s:.1f}",
                "PLAIN": "{.plain_tokens_per_s:.1f}",
                **_RATIO,
            }
            _print_by_turns(measure(chosen.directory, settings), columns, output)
            return
        from baton.bench.micro.engine import EngineBenchConfig, run

        config = EngineBenchConfig(
            chosen.directory,
            chosen.name,
            dtype,
            kv_cache_dtype,
            None if quantization == "off" else quantization,
            dequantize or chosen.dequantize,
            context_tokens,
            steps,
            threads=count,
        )
        if adapters:
            from baton.bench.micro.adapters import measure as measure_adapters

            columns = {"STEP": "{.step}", "TOKENS/S": "{.tokens_per_s:.1f}"}
            columns |= {"WITHOUT": "{.plain_tokens_per_s:.1f}", **_RATIO}
            _print_by_turns(measure_adapters(config, adapters, adapter_rank, ranks), columns, output)
            return
        if ranks.num_ranks > 1:
            from baton.bench.micro.ranks import measure as measure_ranks

            columns = {"STEP": "{.step}", "TOKENS/S": "{.tokens_per_s:.1f}"}
            columns |= {"ONE PROCESS": "{.one_process_tokens_per_s:.1f}", **_RATIO}
            _print_by_turns(measure_ranks(config, ranks), columns, output)
            return
        report = run(config)
    if not printed_as_data(asdict(report), output):
        print_engine(report)


def _print_figures(figures: Sequence[object], columns: Mapping[str, str]) -> None:
    """Prints a table; each column is a format of an attribute of the figures, such as `{.step_ms:.2f}`."""
    print_table(list(columns), [[form.format(figure) for form in columns.values()] for figure in figures])


def _print_by_turns(figures: Sequence[Any], columns: Mapping[str, str], output: Format) -> None:
    if not printed_as_data([asdict(figure) for figure in figures], output):
        _print_figures(figures, columns)


def print_engine(report: EngineReport) -> None:
    """Prints a report as text."""
    print_text(
        f"{report.model}, {report.dtype}, {report.weight_bytes / 1e6:.0f} MB of weights, "
        f"{report.context_tokens} tokens of context in {report.cache_dtype}, "
        f"{report.threads} threads of {report.processor}; "
        f"bit-exact: {'yes' if report.bit_exact else 'no'}\n"
    )
    print_text(
        f"memory    {report.read_gb_per_s:.1f} GB/s [{report.read_gb_per_s_p10:.1f}, {report.read_gb_per_s_p90:.1f}] "
        f"({report.read_way})"
    )
    print_text(
        f"products  {report.product_gflop_per_s:.0f} GFLOP/s [{report.product_gflop_per_s_p10:.0f}, "
        f"{report.product_gflop_per_s_p90:.0f}] ({report.product_way})"
    )
    print_text(
        f"prefill   {report.prefill_tokens_per_s:.0f} tokens/s, {report.prefill_ms:.1f} ms a prompt "
        f"[{report.prefill_ms_p10:.1f}, {report.prefill_ms_p90:.1f}]: {report.prefill_share_of_product_rate:.1%} of "
        f"the product rate ({report.prefill_share_with_attention:.1%} with attention's operations)"
    )
    print_text(
        f"attention {report.attention_paged_ms:.2f} ms at 16 x 1024 tokens, 32/8 heads of 64; "
        f"{report.attention_gathered_ms:.2f} ms gathered: {report.attention_speedup:.1f} times as fast"
    )
    print_text(
        f"sharing   {report.attention_shared_ms:.2f} ms where the 16 share these tokens and have 16 more of their own; "
        f"{report.attention_apart_ms:.2f} ms where they share none: {report.attention_shared_ratio:.2f} of the time\n"
    )
    _print_figures(
        report.decode,
        {
            "BATCH": "{.batch}",
            "TOKENS/S": "{.tokens_per_s:.1f}",
            "STEP MS": "{.step_ms:.2f}",
            "P10": "{.step_ms_p10:.2f}",
            "P90": "{.step_ms_p90:.2f}",
            "FLOOR MS": "{.floor_ms:.2f}",
            "SHARE": "{.share:.2f}",
            "STEP/FLOOR": "{.step_by_floor:.2f}",
        },
    )
    print_text()
    _print_figures(
        report.time_split,
        {
            "STEP": "{.step}",
            "ATTENTION MS": "{.attention_ms:.2f}",
            "PRODUCTS MS": "{.products_ms:.2f}",
            "ELEMENTWISE MS": "{.elementwise_ms:.2f}",
            "SAMPLING MS": "{.sampling_ms:.2f}",
            "PYTHON AND REST MS": "{.python_ms:.2f}",
        },
    )
    print_text()
    if report.bit_exact_cost_by is None:
        print_text(f"bit-exact rule: its cost is not measured, because {report.bit_exact_cost_unknown_because}")
    else:
        by = report.bit_exact_cost_by
        print_text(
            "the bit-exact rule costs, against torch's own unpadded products: "
            f"prefill {by.prefill:.1%}, " + ", ".join(f"decode of {b} {c:.1%}" for b, c in by.decode.items())
        )


@with_flags
def handoff(
    model: ModelOption = None,
    shape: Annotated[
        str,
        typer.Option(
            help="Random weights of a known shape instead: 0.5b, 0.5b-kv, lfm2-700m, qwen3.5-0.8b.", metavar="NAME"
        ),
    ] = "",
    dtype: DtypeOption = "auto",
    given: Annotated[
        Given,
        FlagsOf(
            HandoffBenchConfig, "requests prompt_tokens new_tokens max_num_batched_tokens threads other_block_size"
        ),
    ] = NOT_GIVEN,
    output: OutputOption = Format.TEXT,
) -> None:
    """Measure a hand-off between two nodes, and compare it with a single engine and with bare NIXL reads."""
    from baton.bench.results.host import set_compute_threads

    set_compute_threads(given["threads"])
    with chosen_model(model, shape) as chosen:
        from baton.bench.micro.handoff import run

        report = run(HandoffBenchConfig(chosen, dtype, **given))
    values = asdict(report)
    if not printed_as_data(values, output):
        for reads in values.pop("mixed_reads"):
            sizes = f"{reads.pop('sender_block_size')} to {reads.pop('reader_block_size')}"
            values |= {f"{key}, {sizes}": value for key, value in reads.items()}
        rows = [[key, f"{value:.3f}" if isinstance(value, float) else str(value)] for key, value in values.items()]
        print_table(["WHAT", "MEDIAN"], rows)


@with_flags
def scheduler(
    given: Annotated[Given, FlagsOf(SchedulerBenchConfig, "prompt_tokens rounds")] = NOT_GIVEN,
    output: OutputOption = Format.TEXT,
) -> None:
    """Measure the time to schedule and commit a step, in microseconds, without a model."""
    from baton.bench.micro.scheduler import run

    values = asdict(run(SchedulerBenchConfig(**given)))
    if not printed_as_data(values, output):
        steady = values.pop("steady_us")
        rows = [[f"steady step, {running} running", f"{took:.1f}"] for running, took in steady.items()]
        rows += [
            [name.removesuffix("_us").replace("_us_", ", ").replace("_", " "), f"{took:.1f}"]
            for name, took in values.items()
        ]
        print_table(["WHAT", "MICROSECONDS"], rows)


@with_flags
def router(
    streams: Annotated[
        list[int] | None, typer.Option(help="Open streams; may be repeated. Default: 1000.", min=1, max=100_000)
    ] = None,
    given: Annotated[
        Given,
        FlagsOf(RouterBenchConfig, "nodes front connections tokens_per_s requests_per_s rounds round_s"),
    ] = NOT_GIVEN,
    model: ModelOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Measure what a router sustains on one core, with simulated nodes, real processes and real text.

    The router has a core to itself; nodes and clients are one process on another core. P50 and P99 are the time from a
    node's report of a token until its client has it, with the work of node and client; the latency that the router
    adds is shown separately. CPU is the share of each process's core: if LOAD is near 1, nodes and clients are the
    bottleneck. Run it on an otherwise idle machine with at least two cores.
    """
    from baton.bench.micro.router import run

    model_dir, reports = named_model(model).directory, []
    for count in streams or [1000]:
        if output is Format.TEXT:
            print_note(f"measuring with {count} streams")
        report = run(RouterBenchConfig(model_dir, count, **given))
        reports.append(report)
        if output is Format.TEXT:
            _print_router(report)
    printed_as_data([report.summary() for report in reports], output)


def _print_router(report: RouterReport) -> None:
    print_text(
        f"{report.streams} streams over {report.front}, {report.nodes} nodes, {report.processor}: "
        f"{report.kb_per_stream:.1f} kB per stream over {report.router_mb:.0f} MB; "
        f"placement {_spread(report.placement_us)} us, {_spread(report.placement_all_news_us)} with news of every node"
    )
    added = report.added_latency_ms
    print_text(
        f"added latency at half load: p50 {added.p50:.2f} ms, p99 {added.p99:.2f} ms, beside "
        f"{_spread(report.direct_ms)} ms without a router"
    )
    loads = {"relay": report.relay, "half": report.half, "mixed": report.mixed, "requests": report.requests}
    print_table(
        [
            "LOAD",
            "TOKENS/S",
            "REQUESTS/S",
            "REFUSED/S",
            "PER MESSAGE",
            "P50 MS",
            "P99 MS",
            "CPU ROUTER",
            "CPU LOAD",
        ],
        [
            [
                name,
                _spread(load.tokens_per_s),
                _spread(load.requests_per_s),
                f"{load.refused_per_s:.0f}",
                f"{load.tokens_per_message:.2f}",
                _spread(load.latency_ms_p50),
                _spread(load.latency_ms_p99),
                f"{load.router_cpu:.2f}",
                f"{load.load_cpu:.2f}",
            ]
            for name, load in loads.items()
        ],
    )


def _spread(spread: Spread) -> str:
    digits = 0 if spread.median >= 100 else 2
    return f"{spread.median:.{digits}f} [{spread.p10:.{digits}f}, {spread.p90:.{digits}f}]"
