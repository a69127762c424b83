"""Adapters of a model in several ranks and stages are loaded everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterFiles, open_adapter, read_adapter
from baton.model_formats.files import only_below
from baton.runner.adapters.commands import AdapterAnswer, AdapterCommand, AdapterServant, OpenQuestions
from baton.runner.adapters.in_parts import AdaptersInParts
from baton.runner.adapters.model_adapters import Checked, ModelAdapters
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_adapter_files import FakeAdapterFiles
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.support.adapter_files import expert_tensors, lora_tensors, write_adapter
from tests.support.adapter_runs import load_adapter, outputs
from tests.support.tiny_models import TINY_MODELS

Q_PROJ = "model.layers.{}.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_random_model(directory, TINY_MODELS["mixtral"], seed=5)
    return directory


def four_parts(base: Path) -> TorchModelRunner:
    spec = TorchSpec(base, dtype="float32", num_blocks=64, tensor_parallel=2, pipeline_parallel=2, max_lora_rank=8)
    return load_runner(spec, start_ranks=FakeRankGroup, start_stages=FakeStages.start)


@pytest.fixture
def runner(base: Path) -> Iterator[TorchModelRunner]:
    """Two stages of two ranks, as threads."""
    with closing(four_parts(base)) as divided:
        yield divided


def parts_of(runner: TorchModelRunner) -> dict[str, ModelAdapters]:
    """The adapters of each process, by the name of what it stands for."""
    leader = runner._leader
    assert isinstance(leader, FakeStages)
    (first,) = leader.workers
    groups = {"rank": leader._own_ranks, "stage's rank": first._first_rank}
    ranks = {name: group.followers.adapter_parts[0].known for name, group in groups.items()}  # type: ignore[union-attr]
    return {"leader": runner._adapters, "stage": first._transformer.adapters, **ranks}


def slots_in_use(runner: TorchModelRunner) -> list[int]:
    """The slots in which all processes have an adapter; fails if they differ."""
    own, *others = (
        [slot for slot, loaded in enumerate(part._loaded) if loaded is not None] for part in parts_of(runner).values()
    )
    assert others == [own] * 3
    return own


def of_layers(directory: Path, *layers: int, rank: int = 4, seed: int = 0) -> Path:
    tensors = lora_tensors({Q_PROJ.format(layer): (64, 64) for layer in layers}, rank, seed)
    return write_adapter(directory, tensors, rank)


@pytest.mark.parametrize("where", ["leader", "rank", "stage", "stage's rank"])
@pytest.mark.parametrize(
    ("fault", "said", "may_pass"),
    [
        (OSError("input/output error"), "input/output error", True),
        (AdapterRefused("it is broken"), "it is broken", False),
    ],
    ids=["disk", "files"],
)
def test_an_adapter_that_one_process_can_not_load_is_loaded_nowhere(
    runner: TorchModelRunner, tmp_path: Path, where: str, fault: Exception, said: str, may_pass: bool
) -> None:
    kept = load_adapter(runner, of_layers(tmp_path / "kept", 0, 2))
    expected = outputs(runner, "", kept)
    part = parts_of(runner)[where]

    def fails(_: Path) -> AdapterFiles:
        raise fault

    part._read_files, read = fails, part._read_files
    refused = of_layers(tmp_path / "other", 0, 2, seed=1)
    with pytest.raises((AdapterRefused, OSError), match=said) as caught:
        load_adapter(runner, refused)
    if where != "leader":
        assert isinstance(caught.value.__cause__, RuntimeError) == may_pass
        assert str(caught.value).startswith("rank 1: " if where == "rank" else "rank 2: ")
    assert slots_in_use(runner) == [0]
    assert outputs(runner, "", kept) == expected
    part._read_files = read
    other = load_adapter(runner, refused)
    assert slots_in_use(runner) == [0, 1]
    runner.adapters.unload(kept)
    runner.adapters.check(refused)  # the stages have answered what came before
    assert slots_in_use(runner) == [1]
    assert outputs(runner, "") == expected[:1]
    assert outputs(runner, other) != expected[:1]


def test_modules_must_have_a_place_in_one_of_the_stages(runner: TorchModelRunner, tmp_path: Path) -> None:
    load_adapter(runner, of_layers(tmp_path / "first", 0))
    load_adapter(runner, of_layers(tmp_path / "last", 2))
    assert runner.adapters.check(of_layers(tmp_path / "both", 0, 1, 2)).num_modules == 3
    for directory in (of_layers(tmp_path / "none", 0, 3), of_layers(tmp_path / "nowhere", 9)):
        for tried in (runner.adapters.check, lambda one: load_adapter(runner, one)):
            with pytest.raises(
                AdapterRefused, match=r"layers\.\d\.self_attn\.q_proj, and this model has no such layer"
            ):
                tried(directory)
    for tried in (runner.adapters.check, lambda one: load_adapter(runner, one)):
        with pytest.raises(AdapterRefused, match="has the rank 9, and at most 8 is allowed"):
            tried(of_layers(tmp_path / "high", 0, 2, rank=9))
    wide = write_adapter(tmp_path / "wide", lora_tensors({Q_PROJ.format(0): (64, 32)}))
    with pytest.raises(AdapterRefused, match=r"^rank 2: .* the adapter is of another base model"):
        runner.adapters.check(wide)
    assert slots_in_use(runner) == [0, 1]


def test_all_processes_read_where_the_one_that_leads_may_alone(runner: TorchModelRunner, tmp_path: Path) -> None:
    adapter = of_layers(tmp_path / "allowed", 0, 2)
    digest = open_adapter(adapter).digest()
    part = parts_of(runner)["stage"]
    part._read_files, read = lambda _: read_adapter(of_layers(tmp_path / "else", 0, 2)), part._read_files
    with only_below([str(tmp_path / "allowed")]):
        with pytest.raises(AdapterRefused, match=r"^rank 2: .*leads out of the directories"):
            runner.adapters.load(adapter, digest)
        part._read_files = read
        runner.adapters.load(adapter, digest)


def test_steps_do_not_depend_on_how_far_another_load_is(runner: TorchModelRunner, base: Path, tmp_path: Path) -> None:
    """Experts with an adapter are computed otherwise, with other exchanges between ranks."""
    used = load_adapter(runner, of_layers(tmp_path / "used", 0, 2))
    expected = outputs(runner, "", used)
    tensors: dict[str, Any] = {}
    for layer in range(3):
        tensors |= expert_tensors(f"model.layers.{layer}.mlp.experts", [(256, 64), (64, 128)], 4)
    parameters = ["mlp.experts.gate_up_proj", "experts.down_proj"]
    files = write_adapter(tmp_path / "experts", tensors, target_modules=[], target_parameters=parameters)
    for name in ("leader", "stage's rank"):
        parts_of(runner)[name].load(files, open_adapter(files).digest(), 8, 1)
        assert outputs(runner, "", used) == expected


class Awaited(Future[AdapterAnswer]):
    """An answer that says when somebody waits for it."""

    def __init__(self, do: str, told: list[str]) -> None:
        super().__init__()
        self._do = do
        self._told = told
        self.set_result(AdapterAnswer())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._told.append(f"{self._do} is awaited")
        return super().exception(timeout)


class Recorded:
    """A process that leads, which can load nothing, and one that does what it is told."""

    name = "rank 1"

    def __init__(self) -> None:
        self.told: list[str] = []

    def ask(self, command: AdapterCommand) -> Future[AdapterAnswer]:
        self.told.append(f"{command.do} is asked")
        return Awaited(command.do, self.told)

    def check(self, directory: Path, max_rank: int) -> Checked:
        raise AdapterRefused("broken")

    def load(self, directory: Path, digest: str, max_rank: int, slot: int) -> dict[str, str]:
        raise AdapterRefused("broken")

    def free(self, slot: int) -> None:
        self.told.append("free here")


def test_a_load_that_fails_has_ended_everywhere_before_its_slot_is_free() -> None:
    """Otherwise the next adapter would get a slot into which a process still loads this one."""
    recorded = Recorded()
    with pytest.raises(AdapterRefused):
        AdaptersInParts(recorded, [recorded]).load(Path("/adapter"), "", 8, 0)
    assert recorded.told == ["load is asked", "load is awaited", "free is asked", "free is awaited", "free here"]


def test_steps_name_an_adapter_that_all_processes_have(runner: TorchModelRunner, tmp_path: Path) -> None:
    parts = parts_of(runner)
    seen: list[list[str]] = []

    def reads(directory: Path) -> AdapterFiles:
        seen.append(list(parts["leader"].slots))
        return read_adapter(directory)

    parts["stage"]._read_files = reads
    digest = load_adapter(runner, of_layers(tmp_path, 0, 2))
    assert (seen, list(parts["leader"].slots)) == ([[]], [digest])


def test_another_host_reads_where_its_own_operator_allows_it(tmp_path: Path, base: Path) -> None:
    """The first host's operator allows other directories, which may have other files there."""
    adapter = of_layers(tmp_path / "first", 0, 2)
    answers: list[AdapterAnswer] = []
    with closing(load_runner(TorchSpec(base, dtype="float32", num_blocks=64))) as runner:
        for allowed in (tmp_path / "second", tmp_path / "first"):
            done = SimpleQueue[bytes]()
            servant = AdapterServant(runner._adapters, done.put, lambda allowed=allowed: [str(allowed)])  # type: ignore[misc]
            questions = OpenQuestions()
            command = AdapterCommand("check", str(adapter), max_rank=8, roots=[str(tmp_path)])
            asked = questions.ask(command, servant.take)
            questions.answer(done.get(timeout=60))
            answers.append(asked.result())
    assert "leads out of the directories" in answers[0].refusal
    assert answers[1] == AdapterAnswer(elsewhere=[])


def test_a_load_ends_when_a_rank_is_lost(base: Path, tmp_path: Path) -> None:
    adapter = of_layers(tmp_path, 0, 2)
    held = FakeAdapterFiles.of(adapter)
    runner = four_parts(base)
    with closing(runner), ThreadPoolExecutor(1) as pool:
        part = parts_of(runner)["stage"]
        part._read_files = lambda _: held
        loading = pool.submit(load_adapter, runner, adapter)
        held.is_read.wait()
        assert runner._leader is not None
        runner._leader.followers.declare_lost("rank 2 has ended")
        with pytest.raises(RankLost, match="rank 2 has ended"):
            loading.result(60)
        held.answers.set()
        with pytest.raises(RankLost):
            runner.adapters.check(adapter)
