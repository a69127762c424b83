"""`baton bench engine`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli.bench.load_options import DtypeOption, ShapeOption, speculation_callback
from baton.cli.bench.model import ModelOption, chosen_model
from baton.cli.output import Format, OutputOption, print_json, print_table, print_text, print_yaml
from baton.config.kinds import KVCacheDtype
from baton.errors import UsageError
from baton.messages.node import NodeShape
from baton.model_formats.adapters import MAX_RANK
from baton.models.resolve import FoundModel

if TYPE_CHECKING:
    from baton.bench.micro.engine import EngineBenchConfig, EngineReport


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
    so many requests decode with an adapter each, or all with one, and without any, by turns.
    """
    from baton.bench.results.host import set_compute_threads, usable_cores

    ranks = NodeShape(tp, pp)
    if speculative and ranks.num_ranks > 1:
        raise UsageError("--speculative excludes --tp and --pp")
    if adapters and (speculative or ranks.num_ranks > 1):
        raise UsageError("--adapters excludes --speculative, --tp and --pp")
    count = threads or usable_cores()
    set_compute_threads(count)
    with chosen_model(model, shape) as chosen:
        if speculative:
            _measure_speculation(chosen, dtype, kv_cache_dtype, quantization, speculative, count, output)
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
        if ranks.num_ranks > 1:
            _measure_ranks(config, ranks, output)
            return
        if adapters:
            _measure_adapters(config, adapters, adapter_rank, output)
            return
        report = run(config)
    if not _printed(asdict(report), output):
        _print(report)


def _printed(report: object, output: Format) -> bool:
    """Print a report as JSON or YAML; returns False, and prints nothing, where a text is wanted."""
    if output is Format.JSON:
        print_json(report)
    elif output is Format.YAML:
        print_yaml(report)
    return output is not Format.TEXT


def _measure_ranks(config: EngineBenchConfig, ranks: NodeShape, output: Format) -> None:
    from baton.bench.micro.ranks import measure

    figures = measure(config, ranks)
    if not _printed([asdict(one) for one in figures], output):
        print_table(
            ["STEP", "TOKENS/S", "ONE PROCESS", "RATIO", "P10", "P90"],
            [
                [
                    one.step,
                    f"{one.tokens_per_s:.1f}",
                    f"{one.one_process_tokens_per_s:.1f}",
                    f"{one.ratio:.2f}",
                    f"{one.ratio_p10:.2f}",
                    f"{one.ratio_p90:.2f}",
                ]
                for one in figures
            ],
        )


def _measure_adapters(config: EngineBenchConfig, num_adapters: int, rank: int, output: Format) -> None:
    from baton.bench.micro.adapters import measure

    figures = measure(config, num_adapters, rank)
    if not _printed([asdict(one) for one in figures], output):
        print_table(
            ["STEP", "TOKENS/S", "WITHOUT", "RATIO", "P10", "P90"],
            [
                [
                    one.step,
                    f"{one.tokens_per_s:.1f}",
                    f"{one.plain_tokens_per_s:.1f}",
                    f"{one.ratio:.2f}",
                    f"{one.ratio_p10:.2f}",
                    f"{one.ratio_p90:.2f}",
                ]
                for one in figures
            ],
        )


def _measure_speculation(
    chosen: FoundModel,
    dtype: str,
    kv_cache_dtype: str,
    quantization: str,
    config: str,
    threads: int,
    output: Format,
) -> None:
    from baton.bench.micro.speculation import measure

    settings = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
        "dequantize": chosen.dequantize,
        "speculative_config": config,
        "threads": threads,
    }
    figures = measure(chosen.directory, settings)
    if not _printed([asdict(one) for one in figures], output):
        print_table(
            ["TEXT", "TOKENS", "ACCEPTED", "TOKENS/S", "PLAIN", "RATIO", "P10", "P90"],
            [
                [
                    one.workload,
                    str(one.num_tokens),
                    f"{one.acceptance_length:.2f}",
                    f"{one.tokens_per_s:.1f}",
                    f"{one.plain_tokens_per_s:.1f}",
                    f"{one.ratio:.2f}",
                    f"{one.ratio_p10:.2f}",
                    f"{one.ratio_p90:.2f}",
                ]
                for one in figures
            ],
        )


def _print(report: EngineReport) -> None:
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
    print_table(
        ["BATCH", "TOKENS/S", "STEP MS", "P10", "P90", "FLOOR MS", "SHARE", "STEP/FLOOR"],
        [
            [
                str(one.batch),
                f"{one.tokens_per_s:.1f}",
                f"{one.step_ms:.2f}",
                f"{one.step_ms_p10:.2f}",
                f"{one.step_ms_p90:.2f}",
                f"{one.floor_ms:.2f}",
                f"{one.share:.2f}",
                f"{1 / one.share:.2f}",
            ]
            for one in report.decode
        ],
    )
    print_text()
    print_table(
        ["STEP", "ATTENTION MS", "PRODUCTS MS", "ELEMENTWISE MS", "SAMPLING MS", "PYTHON AND REST MS"],
        [
            [
                one.step,
                f"{one.attention_ms:.2f}",
                f"{one.products_ms:.2f}",
                f"{one.elementwise_ms:.2f}",
                f"{one.sampling_ms:.2f}",
                f"{one.python_ms:.2f}",
            ]
            for one in report.time_split
        ],
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
