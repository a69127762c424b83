"""`baton bench nodes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.bench.flag import Flag
from baton.bench.workloads.spec import PLAIN_BURSTINESS, WorkloadSpec
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags
from baton.cli.bench.options import (
    Destination,
    DtypeOption,
    GoodputOption,
    MaxConcurrencyOption,
    MoreGoodputArgument,
    NumWarmupsOption,
    ReportOption,
    ResultFileOption,
    ShapeOption,
    WorkloadSeedOption,
    check_files,
    chosen_model,
    created_now,
)
from baton.cli.bench.serve import count_requests, print_rows, raise_exit, show_progress, slo_of, usage_errors
from baton.cli.output import Format, OutputOption, print_table, print_text
from baton.cli.target import RunDirOption, local_cluster
from baton.errors import InvalidRequest, UsageError
from baton.security.access import DEFAULT_CLUSTER, Access, default_access

if TYPE_CHECKING:
    from baton.bench.live_cluster import FoundCluster

_COLUMNS = ("NODE", "ROLE", "RUN", "WAIT", "WAIT REMOTE KV", "KV%", "LEASED", "SAMPLES", "MISSED")


@with_flags
def nodes(
    more_goodput: MoreGoodputArgument = None,
    start: Annotated[
        str, typer.Option(help="Start a cluster here: colocated, conditional or an arrangement like 1p1d.")
    ] = "",
    num_nodes: Annotated[int, typer.Option("--nodes", help="Nodes of the cluster of --start.", min=2)] = 2,
    model: Annotated[
        Path | None,
        typer.Option(
            help="For --start: what `baton up --model` takes. Default: the bundled model.",
            metavar="MODEL",
        ),
    ] = None,
    shape: ShapeOption = "",
    dtype: DtypeOption = "auto",
    run_dir: RunDirOption = None,
    registry: Annotated[
        str, typer.Option(help="Redis of a running cluster, on one or several hosts.", metavar="URL")
    ] = "",
    cluster: Annotated[str, typer.Option(help="The cluster's name in the registry.")] = DEFAULT_CLUSTER,
    arrivals: Annotated[
        Given,
        FlagsOf(
            WorkloadSpec,
            "dataset dataset_path num_prompts request_rate burstiness",
            flags={"burstiness": PLAIN_BURSTINESS},
        ),
    ] = NOT_GIVEN,
    max_concurrency: MaxConcurrencyOption = None,
    lengths: Annotated[
        Given,
        FlagsOf(
            WorkloadSpec,
            "random_input_len random_output_len random_range_ratio time_scale length_scale output_scale",
            flags={
                "random_output_len": Flag("Tokens to generate.", min=1),
                "time_scale": Flag("Replay a trace this many times as fast.", min=1e-6),
                "length_scale": Flag("Factor of prompt and shared block lengths.", min=1e-6),
                "output_scale": Flag("Factor of output lengths.", min=1e-6),
            },
            defaults={"random_input_len": 512, "random_output_len": 64},
        ),
    ] = NOT_GIVEN,
    goodput: GoodputOption = None,
    processes: Annotated[int, typer.Option(help="Generator processes.", min=1)] = 1,
    num_warmups: NumWarmupsOption = 0,
    seed: WorkloadSeedOption = 0,
    result_filename: ResultFileOption = None,
    report: ReportOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Put a load on a cluster, on this machine or on several hosts, and watch each of its nodes.

    The cluster is started here (--start), or found by a run directory or a registry. Latencies are measured on the
    generator's clock alone, and samples of nodes are placed on this command's; clocks of nodes are not compared.
    """
    from baton.bench.load.endpoint import Target
    from baton.bench.load.probe import probe
    from baton.bench.load.report import remarks, rows
    from baton.bench.load.run import LoadPlan
    from baton.bench.nodes.run import nodes_result, run_watched
    from baton.bench.nodes.timeline import peak_rows

    _check(start, shape, model, registry, run_dir)
    check_files(result_filename, report)
    slo = slo_of(goodput, more_goodput)
    with usage_errors():
        workload = WorkloadSpec(**arrivals, **lengths, seed=seed)
        total = count_requests(workload)
    with _cluster(start, num_nodes, model, shape, dtype, run_dir, registry, cluster) as live:
        access = default_access.get()
        ca = access.tls_ca
        asked = Target("baton", live.grpc_address, is_tls=ca is not None, api_key=access.api_key, tls_ca=str(ca or ""))
        target = probe(asked).target
        plan = LoadPlan(target, workload, processes, max_concurrency, num_warmups=num_warmups)
        with show_progress(total, output is Format.TEXT) as on_progress:
            ran = run_watched(live, plan, on_progress)
    result = nodes_result(plan, ran, slo, (99.0,), start or "running", created_now())

    def print_result() -> None:
        print_rows(rows(result, (99.0,)))
        print_text("\nThe maximum of each node during the run:")
        print_table(_COLUMNS, peak_rows(ran.samples))

    notes = remarks(ran.run, result, slo)
    if ran.impossible_spans:
        notes.append(
            f"{ran.impossible_spans} requests took longer in the cluster than their client waited: a duration was "
            "measured across the clocks of two hosts"
        )
    destination = Destination(output, result_filename, report)
    destination.show(result, print_result, notes)
    raise_exit(ran.run, result, destination)


def _check(start: str, shape: str, model: Path | None, registry: str, run_dir: Path | None) -> None:
    """Raises a usage error for flags that exclude each other."""
    if (shape or model is not None) and not start:
        raise UsageError("--model and --shape need --start")
    if sum(map(bool, (start, registry, run_dir))) > 1:
        raise UsageError("--start, --registry and --run-dir exclude each other")


@contextmanager
def _cluster(
    start: str,
    num_nodes: int,
    model: Path | None,
    shape: str,
    dtype: str,
    run_dir: Path | None,
    registry: str,
    name: str,
) -> Iterator[FoundCluster]:
    from baton.bench.arrangement import chosen as chosen_arrangements
    from baton.bench.live_cluster import find_by_operator, find_in_registry, pinned_cluster

    if start:
        # A cluster that is started here has no TLS and no keys.
        default_access.set(Access())
        try:
            (arrangement,) = chosen_arrangements([start], num_nodes)
        except InvalidRequest as error:
            raise UsageError(f"--start: {error.reason}") from None
        with (
            chosen_model(model, shape) as chosen,
            pinned_cluster(arrangement, chosen, dtype, "--model-name", chosen.name) as live,
        ):
            yield live
    elif registry:
        default_access.set(replace(default_access.get(), cluster=name))
        yield find_in_registry(registry, name)
    else:
        cluster = local_cluster(run_dir, "--registry")
        state = cluster.state
        if not state.grpc_address or not state.operator_address:
            raise cluster.no_router_ready()
        yield find_by_operator(state.grpc_address, state.operator_address)
