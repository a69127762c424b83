"""What PEFT's adapter_config.json says: ranks and factors of a LoRA adapter. What Baton does not compute is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.errors import AdapterRefused
from baton.model_formats.regular_files import open_regular

CONFIG_NAME = "adapter_config.json"

MAX_RANK = 512
"""The highest rank that `--max-lora-rank` may allow."""

DEFAULT_MAX_RANK = 64

_MOST_BYTES = 4 << 20
_MOST_PATTERNS = 16_384
_MOST_EXPRESSIONS = 64
"""Patterns that are regular expressions, which are tried for each module."""
_LONGEST_PATTERN = 256
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_EXPRESSION = re.compile(r"(?:[A-Za-z0-9_.|^$-]|\\[.dw]|\[[A-Za-z0-9_-]+\]|[()]|(?<![()*+?])[*+?](?![*+?]))+")
_MOST_REPEATS = 2

_WITHOUT_EFFECT = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "init_lora_weights",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)
"""Settings of training and of PEFT itself, whatever their values."""

_ONLY_NAMES = frozenset(("exclude_modules", "layers_pattern", "layers_to_transform", "target_parameters"))
"""Settings that say which modules have tensors, as the names of the tensors do."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter that change what it computes."""

    rank: int
    alpha: float
    uses_rslora: bool
    """Whether the factor is alpha / sqrt(rank), not alpha / rank."""
    rank_pattern: Mapping[str, int]
    """Ranks of the modules whose name ends with a pattern; the first one that matches counts."""
    alpha_pattern: Mapping[str, float]
    has_lora_bias: bool
    target_modules: tuple[str, ...] | str
    """Last parts of the names of the modules that it changes; a text: "all-linear", or a regular expression, which is
    never evaluated."""
    modules_to_save: tuple[str, ...]
    """Last parts of the names of the modules that it replaces."""
    base_model: str = ""
    """What the files call the base model."""

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def factor_of(self, module: str) -> float:
        """The number with which B A x is multiplied in a module."""
        rank, alpha = self.rank_of(module), float(_of_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether the adapter is meant to change this module, as far as its names say."""
        if isinstance(self.target_modules, str):
            return True
        return any(module == target or module.endswith(f".{target}") for target in self.target_modules)

    def canonical(self) -> bytes:
        """The settings as text, the same for equal settings."""
        fields = asdict(self)
        del fields["base_model"]
        fields["alpha"] = float(self.alpha)
        fields["alpha_pattern"] = {name: float(alpha) for name, alpha in self.alpha_pattern.items()}
        if not isinstance(self.target_modules, str):
            fields["target_modules"] = sorted(self.target_modules)
        fields["modules_to_save"] = sorted(self.modules_to_save)
        # The order of patterns matters: the first one that matches counts.
        fields["rank_pattern"] = list(fields["rank_pattern"].items())
        fields["alpha_pattern"] = list(fields["alpha_pattern"].items())
        return json.dumps(fields, sort_keys=True).encode()


def read_config(directory: Path) -> AdapterConfig:
    """Read and check an adapter's settings. Raises AdapterRefused."""
    path = directory / CONFIG_NAME
    given = _read_json(path)
    kind = given.get("peft_type")
    if kind != "LORA":
        raise AdapterRefused(f"{path} has the peft_type {_short(kind)}; only LORA is computed")
    for name, value in given.items():
        if name not in _WITHOUT_EFFECT and name not in _ONLY_NAMES and name not in _READERS and not _is_off(value):
            raise AdapterRefused(
                f"{path} sets {_short(name)} to {_short(value)}, which Baton does not compute; train without it, or "
                "merge the adapter into its base model"
            )
    read = {name: reader(path, name, given.get(name)) for name, reader in _READERS.items()}
    return AdapterConfig(
        rank=read["r"],
        alpha=read["lora_alpha"],
        uses_rslora=read["use_rslora"],
        rank_pattern=read["rank_pattern"],
        alpha_pattern=read["alpha_pattern"],
        has_lora_bias=read["lora_bias"],
        target_modules=read["target_modules"],
        modules_to_save=read["modules_to_save"],
        base_model=str(given.get("base_model_name_or_path") or "")[:256],
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise AdapterRefused(f"{path.parent} has no {path.name}; name a directory that PEFT's save_pretrained wrote")
    try:
        with open_regular(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise AdapterRefused(f"{path} has more than {_MOST_BYTES} bytes; copy it again")
        value = json.loads(content)
    except (ValueError, OSError, RecursionError) as error:
        raise AdapterRefused(f"{path} can't be read as JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise AdapterRefused(f"{path} is not a JSON object; copy it again")
    return value


def _short(value: object) -> str:
    return f"{value!r:.60}"


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ("none", [], {})


def _wrong(path: Path, name: str, expected: str, value: object) -> AdapterRefused:
    return AdapterRefused(f"{path}: {name} must be {expected}, not {_short(value)}; copy it again")


def _rank(path: Path, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(path, name, "a whole number from 1 on", value)
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise _wrong(path, name, "a finite number", value)
    return float(value)  # type: ignore[arg-type]


def _flag(path: Path, name: str, value: object) -> bool:
    if value is not None and type(value) is not bool:
        raise _wrong(path, name, "true or false", value)
    return bool(value)


def _ranks(path: Path, name: str, value: object) -> Mapping[str, int]:
    return {pattern: _rank(path, name, rank) for pattern, rank in _patterns(path, name, value).items()}


def _alphas(path: Path, name: str, value: object) -> Mapping[str, float]:
    return {pattern: _alpha(path, name, alpha) for pattern, alpha in _patterns(path, name, value).items()}


def _patterns(path: Path, name: str, value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MOST_PATTERNS:
        raise _wrong(path, name, f"an object of at most {_MOST_PATTERNS} patterns", value)
    expressions = [pattern for pattern in value if not _PLAIN.fullmatch(pattern)]
    if len(expressions) > _MOST_EXPRESSIONS:
        raise AdapterRefused(f"{path}: {name} has more than {_MOST_EXPRESSIONS} regular expressions; name the modules")
    for pattern in expressions:
        _check_expression(path, name, pattern)
    return value


def _check_expression(path: Path, name: str, pattern: str) -> None:
    """Refuse expressions that could take long: repeated groups, and many repeats."""
    repeats = sum(pattern.count(sign) for sign in "*+?")
    if len(pattern) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or not _EXPRESSION.fullmatch(pattern):
        raise AdapterRefused(
            f"{path}: {name} has the pattern {_short(pattern)}, which is too complex; name the modules"
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterRefused(f"{path}: {name} has the pattern {_short(pattern)}, which is none ({error})") from error


def _of_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that matches a module's name, or the end of it from one of its parts on."""
    for pattern, value in patterns.items():
        if _PLAIN.fullmatch(pattern) and "." not in pattern:
            if module.rpartition(".")[2] == pattern:
                return value
        elif re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _targets(path: Path, name: str, value: object) -> tuple[str, ...] | str:
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    return _names(path, name, value)


def _names(path: Path, name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise _wrong(path, name, "a list of names", value)
    return tuple(value)


_READERS = {
    "peft_type": lambda _path, _name, value: value,
    "r": _rank,
    "lora_alpha": _alpha,
    "use_rslora": _flag,
    "rank_pattern": _ranks,
    "alpha_pattern": _alphas,
    "lora_bias": _flag,
    "target_modules": _targets,
    "modules_to_save": _names,
    "fan_in_fan_out": _flag,
}
