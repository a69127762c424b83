"""`baton bench serve`."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer

from baton.bench.workloads.spec import WorkloadSpec
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags
from baton.cli.bench.options import (
    Destination,
    GoodputOption,
    MaxConcurrencyOption,
    MoreGoodputArgument,
    NumWarmupsOption,
    ReportOption,
    WorkloadSeedOption,
    check_files,
    created_now,
)
from baton.cli.output import Format, OutputOption, print_note, print_text
from baton.cli.target import RunDirOption, local_cluster
from baton.errors import BatonError, Cancelled, ExitCode, InvalidRequest, UsageError
from baton.models.resolve import find_model
from baton.security.access import default_access

if TYPE_CHECKING:
    from baton.bench.load.endpoint import Target
    from baton.bench.load.generator import Progress
    from baton.bench.load.run import LoadPlan, LoadRun
    from baton.bench.results.summary import Slo

_WIDTH = 60


class Backend(enum.StrEnum):
    """Protocols of the endpoint."""

    BATON = "baton"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


@with_flags
def serve(
    more_goodput: MoreGoodputArgument = None,
    backend: Annotated[Backend, typer.Option(help="Baton's gRPC, or OpenAI's HTTP.")] = Backend.BATON,
    base_url: Annotated[str, typer.Option(help="http://HOST:PORT of an OpenAI endpoint.", metavar="URL")] = "",
    host: Annotated[str, typer.Option(help="Host of the endpoint. Default: the local cluster.")] = "",
    port: Annotated[int, typer.Option(help="Port of the endpoint.", min=0, max=65535)] = 0,
    endpoint: Annotated[str, typer.Option(help="Path of the HTTP endpoint. Default: the backend's.")] = "",
    run_dir: RunDirOption = None,
    model: Annotated[str, typer.Option(help="Model to ask for. Default: the first that is served.")] = "",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Model whose tokenizer turns prompts into text: what `baton up --model` takes.", metavar="MODEL"
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Token ids are below this. Default: the model's, or 256 if it is unknown.", min=0)
    ] = 0,
    api_key: Annotated[
        str, typer.Option(help="Bearer token. Default: $BATON_API_KEY, or $OPENAI_API_KEY with an openai backend.")
    ] = "",
    arrivals: Annotated[
        Given, FlagsOf(WorkloadSpec, "dataset dataset_path num_prompts request_rate burstiness")
    ] = NOT_GIVEN,
    max_concurrency: MaxConcurrencyOption = None,
    lengths: Annotated[
        Given,
        FlagsOf(
            WorkloadSpec,
            "ramp_up_strategy ramp_up_start_rps ramp_up_end_rps random_input_len random_output_len random_range_ratio "
            "num_prefixes prefix_len suffix_len turns turn_len think_s time_scale length_scale output_scale "
            "max_input_len max_output_len skip_broken_lines",
        ),
    ] = NOT_GIVEN,
    ignore_eos: Annotated[bool, typer.Option(help="Generate the full output length.")] = True,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0, max=2)] = 0.0,
    goodput: GoodputOption = None,
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report, separated by commas.")] = "99",
    num_warmups: NumWarmupsOption = 0,
    request_timeout_s: Annotated[
        float, typer.Option(help="Seconds after which a request is cancelled and counted as failed.", min=1)
    ] = 3600,
    processes: Annotated[
        int | None, typer.Option(help="Generator processes. Default: 1; 2 from 1000/s.", min=1)
    ] = None,
    seed: WorkloadSeedOption = 0,
    label: Annotated[str, typer.Option(help="Name of the measurement in the result.")] = "",
    save_result: Annotated[bool, typer.Option(help="Write the result to a file.")] = False,
    save_detailed: Annotated[
        bool, typer.Option(help="Same as --save-result, whose file always has every request.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of the result file.")] = Path(),
    result_filename: Annotated[
        str, typer.Option(help="Name of the result file. Default: made of backend, rate, model and time.")
    ] = "",
    report: ReportOption = None,
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", "--no-progress", help="No progress bar.")] = False,
    output: OutputOption = Format.TEXT,
) -> None:
    """Put a load on an endpoint and measure latency and throughput, with the flags and keys of `vllm bench serve`.

    Requests are sent at their planned times, whatever became of those before (open loop), and latencies count from
    these times. With --max-concurrency and no rate, a request is sent when one before it has ended (closed loop).
    Ctrl-C ends the run early; the results until then are kept.
    """
    from baton.bench.load.endpoint import Target
    from baton.bench.load.report import remarks, rows, serve_result
    from baton.bench.load.run import LoadPlan, run_load

    is_kept = bool(save_result or save_detailed or result_filename)
    named = result_dir / result_filename
    check_files((named / "result.json" if named.is_dir() else named) if is_kept else None, report)
    slo = slo_of(goodput, more_goodput)
    with usage_errors():
        percentiles = _percentiles(metric_percentiles)
        workload = WorkloadSpec(**arrivals, **lengths, seed=seed)
        total = count_requests(workload)
    address, url_path, is_tls = _locate_endpoint(backend, base_url, host, port, endpoint, run_dir)
    target = Target(
        backend=backend.value,
        address=address,
        path=url_path,
        is_tls=is_tls,
        model=model,
        vocab_size=vocab_size,
        api_key=api_key or os.environ.get("BATON_API_KEY" if backend is Backend.BATON else "OPENAI_API_KEY", ""),
        temperature=temperature,
        ignore_eos=ignore_eos,
        tokenizer=str(find_model(tokenizer, os.environ).directory) if tokenizer is not None else "",
        tls_ca=str(default_access.get().tls_ca or ""),
    )
    plan = LoadPlan(
        _probed(target, workload),
        workload,
        processes or (2 if 1000 <= workload.request_rate < float("inf") else 1),
        max_concurrency,
        request_timeout_s,
        num_warmups,
    )
    with show_progress(total, output is Format.TEXT and not disable_tqdm) as on_progress:
        run = run_load(plan, on_progress)
    path = result_path(result_dir, result_filename, plan, datetime.now(UTC)) if is_kept else None
    destination = Destination(output, path, report)
    result = serve_result(plan, run, slo, percentiles, label, created_now())
    destination.show(result, lambda: print_rows(rows(result, percentiles)), remarks(run, result, slo))
    raise_exit(run, result, destination)


def raise_exit(run: LoadRun, result: Mapping[str, Any], destination: Destination) -> None:
    """Exits with an error if the run was interrupted, lost its endpoint, or had no answer."""
    if run.was_interrupted:
        destination.end_early(Cancelled("interrupted"))
    if run.is_unreachable:
        raise typer.Exit(ExitCode.UNREACHABLE)
    if not result["completed"]:
        raise BatonError("no request was answered; the errors are listed above")


def result_path(folder: Path, name: str, plan: LoadPlan, now: datetime) -> Path:
    """The path of a result; without a name it is made of backend, rate, model and time."""
    path = folder / name
    if name and not path.is_dir():
        return path
    rate = plan.workload.request_rate
    model = plan.target.model.replace("/", "-")
    return path / f"{plan.target.backend}-{rate:g}qps-{model}-{now:%Y%m%d-%H%M%S}.json"


def print_rows(lines: Sequence[tuple[str, str]]) -> None:
    """Prints names and values in vLLM's layout."""
    print_text(f"{' Serving Benchmark Result ':=^{_WIDTH}}")
    for name, value in lines:
        if value:
            print_text(f"{name + ':':<{_WIDTH - 16}}{value:<16}".rstrip())
        else:
            print_text(f"{name:-^{_WIDTH}}")
    print_text("=" * _WIDTH)


def _locate_endpoint(
    backend: Backend, base_url: str, host: str, port: int, endpoint: str, run_dir: Path | None
) -> tuple[str, str, bool]:
    """Returns address, path, and whether the endpoint uses TLS."""
    default_path = {Backend.OPENAI: "/v1/completions", Backend.OPENAI_CHAT: "/v1/chat/completions"}.get(backend, "")
    if base_url:
        if backend is Backend.BATON:
            raise UsageError("--base-url needs an OpenAI endpoint: add --backend openai")
        url = urlsplit(base_url if "//" in base_url else f"//{base_url}")
        if url.scheme not in ("", "http", "https"):
            raise UsageError(f"--base-url begins with {url.scheme}://; use http:// or https://")
        if url.path.strip("/") not in ("", "v1"):  # OpenAI's own clients expect the v1 there
            raise UsageError(f"--base-url has the path {url.path!r}; give the path with --endpoint")
        is_tls = url.scheme == "https"
        try:
            host_and_port = f"{url.hostname or '127.0.0.1'}:{url.port or (443 if is_tls else 80)}"
        except ValueError as error:
            raise UsageError(f"--base-url: {error}") from None
        return host_and_port, endpoint or default_path, is_tls
    if host or port:
        default_port = 50051 if backend is Backend.BATON else 8000
        is_tls = default_access.get().tls_ca is not None
        return f"{host or '127.0.0.1'}:{port or default_port}", endpoint or default_path, is_tls
    cluster = local_cluster(run_dir, "--host and --port" if backend is Backend.BATON else "--base-url")
    address = cluster.state.grpc_address if backend is Backend.BATON else cluster.state.http_address
    if not address:
        raise cluster.no_router_ready()
    return address, endpoint or default_path, bool(cluster.state.certs)


def _probed(target: Target, workload: WorkloadSpec) -> Target:
    """Completes the target; raises Unreachable, and a usage error for prompts that the model can't take."""
    from baton.bench.load.probe import probe

    served = probe(target)
    limit = served.max_model_len
    asked = workload.random_input_len + workload.random_output_len
    if workload.dataset == "random" and limit is not None and asked > limit:
        raise UsageError(
            f"{target.address} takes at most {limit} tokens, prompt and output together; the workload has {asked}: "
            "lower --random-input-len or --random-output-len"
        )
    return served.target


def count_requests(workload: WorkloadSpec) -> int:
    """Counts a workload's requests; raises InvalidRequest for a broken trace and for an empty workload."""
    built = workload.build()
    count = len(built)  # reads a trace to its end, so that a broken line is found before anything runs
    skipped = getattr(built, "num_skipped", 0)
    if skipped:
        print_note(f"{skipped} broken lines of {workload.dataset_path} are skipped")
    if not count:
        raise InvalidRequest("--dataset-path", f"{workload.dataset_path} contains no request")
    return count


def slo_of(goodput: Sequence[str] | None, more: Sequence[str] | None) -> Slo:
    """The SLO of --goodput and of the arguments that follow it on the command line; raises a usage error."""
    from baton.bench.results.summary import Slo

    if more and not goodput:
        raise UsageError(f"unexpected argument {more[0]!r}; limits of an SLO follow --goodput")
    with usage_errors():
        return Slo.parse([word for words in (*(goodput or ()), *(more or ())) for word in words.split()])


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns InvalidRequest and OSError into usage errors: the command line, or a file that it names, is wrong."""
    try:
        yield
    except InvalidRequest as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None


def _percentiles(text: str) -> list[float]:
    def broken() -> NoReturn:
        raise InvalidRequest("--metric-percentiles", f"{text!r} is not a list of numbers from 0 to 100")

    try:
        percentiles = [float(word) for word in text.split(",")]
    except ValueError:
        broken()
    return percentiles if all(0 <= percentile <= 100 for percentile in percentiles) else broken()


@contextlib.contextmanager
def show_progress(total: int, is_wanted: bool) -> Iterator[Callable[[Progress], None]]:
    """Shows a progress bar if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not is_wanted or not console.is_terminal:
        yield lambda _: None
        return
    columns: list[Any] = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    words = "{task.fields[open]} open, {task.fields[failed]} failed, {task.fields[tokens]} tokens"
    with Bar(*columns, TextColumn(words), console=console, transient=True) as bar:
        task = bar.add_task("", total=total, open=0, failed=0, tokens=0)

        def show(progress: Progress) -> None:
            done = progress.completed + progress.failed
            bar.update(task, completed=done, open=progress.open, failed=progress.failed, tokens=progress.tokens)

        yield show
