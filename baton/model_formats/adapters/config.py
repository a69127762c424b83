"""What PEFT's adapter_config.json says: ranks and factors of a LoRA adapter. What Baton does not compute is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from baton.errors import AdapterRefused
from baton.model_formats.files import open_regular

LONGEST = 128
"""Characters of a pattern, and of a module's name."""
MOST_PATTERNS = 4096
_MOST_EXPRESSIONS = 64
"""Patterns that are regular expressions, which are tried for each module."""
_MOST_REPEATS = 1
_MOST_BRANCHINGS = 2
"""Repeats and groups of an expression: each multiplies the time that a name may take."""
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_EXPRESSION = re.compile(r"(?:[A-Za-z0-9_.|^$-]|\\[.dw]|\[[A-Za-z0-9_-]+\]|[()]|(?<![()*+?])[*+?](?![*+?]))+")

T = TypeVar("T")


class UnsoundPattern(Exception):
    """A pattern is none, or could take long; the message says so behind the setting's name."""


class NamePatterns(Generic[T]):
    """Values of modules by patterns of their names, of which the first one that matches counts."""

    def __init__(self, values: Mapping[str, T]) -> None:
        """Raises UnsoundPattern."""
        expressions = [pattern for pattern in values if not _PLAIN.fullmatch(pattern)]
        if len(values) > MOST_PATTERNS:
            raise UnsoundPattern(f"has more than {MOST_PATTERNS} patterns; set the values that most modules have once")
        if len(expressions) > _MOST_EXPRESSIONS:
            raise UnsoundPattern(f"has more than {_MOST_EXPRESSIONS} regular expressions; name the modules")
        self._values = dict(values)
        self._expressions = {pattern: _compiled(pattern) for pattern in expressions}

    def items(self) -> Iterator[tuple[str, T]]:
        """The patterns and their values, in their order."""
        return iter(self._values.items())

    def value_of(self, module: str, otherwise: T) -> T:
        """The value of the first pattern that matches a module's name, or the end of it from one of its parts on."""
        for pattern, value in self._values.items():
            expression = self._expressions.get(pattern)
            if _ends_with(module, pattern) if expression is None else expression.match(module):
                return value
        return otherwise


def _compiled(pattern: str) -> re.Pattern[str]:
    repeats = sum(pattern.count(sign) for sign in "*+?")
    if (
        len(pattern) > LONGEST
        or repeats > _MOST_REPEATS
        or repeats + pattern.count("(") > _MOST_BRANCHINGS
        or not _EXPRESSION.fullmatch(pattern)
    ):
        raise UnsoundPattern(f"has the pattern {pattern!r:.60}, which is too complex; name the modules")
    try:
        re.compile(pattern)
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsoundPattern(f"has the pattern {pattern!r:.60}, which is none ({error})") from error


def _ends_with(module: str, pattern: str) -> bool:
    """Whether a name matches a pattern without signs other than the dot, which stands for any character."""
    before = len(module) - len(pattern)
    if before < 0 or (before and module[before - 1] != "."):
        return False
    return all(wanted in (part, ".") for part, wanted in zip(module[before:], pattern, strict=True))


CONFIG_NAME = "adapter_config.json"

MAX_RANK = 512
"""The highest rank that `--max-lora-rank` may allow."""

DEFAULT_MAX_RANK = 64

_MOST_BYTES = 4 << 20
_MOST_NAMES = 16_384
_LARGEST_RANK = 1 << 20
_LARGEST_ALPHA = 1e30
"""So that factors are finite in float32."""

_KEEPS_BASE = ("gaussian", "orthogonal", "eva")
"""Ways to begin a training, beside PEFT's own, that leave the base model's weights as they are."""

_WITHOUT_EFFECT = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
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

_ONLY_NAMES = frozenset(("exclude_modules", "layers_pattern", "layers_to_transform"))
"""Settings that say which modules have tensors, as the names of the tensors do."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter that change what it computes."""

    rank: int
    alpha: float
    uses_rslora: bool
    """Whether the factor is alpha / sqrt(rank), not alpha / rank."""
    rank_pattern: NamePatterns[int]
    alpha_pattern: NamePatterns[float]
    has_lora_bias: bool
    target_modules: frozenset[str] | str
    """Last parts of the names of the modules that it changes; a text: "all-linear", or a regular expression, which is
    never evaluated."""
    modules_to_save: frozenset[str]
    """Last parts of the names of the modules that it replaces."""
    target_parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Last parts of the names of the parameters that it changes, by the last parts of their modules' names; the empty
    name stands for every module."""
    base_model: str = ""
    """What the files call the base model."""

    def rank_of(self, name: str) -> int:
        """The rank of a module, or of a parameter."""
        return self.rank_pattern.value_of(name, self.rank)

    def factor_of(self, module: str) -> float:
        """The number with which B A x is multiplied in a module, or for a parameter."""
        rank, alpha = self.rank_of(module), self.alpha_pattern.value_of(module, self.alpha)
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether the adapter is meant to change this module, as far as its names say."""
        return isinstance(self.target_modules, str) or _has_end_of(module, self.target_modules)

    def parameters_of(self, module: str) -> frozenset[str]:
        """The parameters of a module that the adapter is meant to change, as far as its names say."""
        names = (self.target_parameters.get(end, frozenset()) for end in ("", *_ends_of(module)))
        return frozenset[str]().union(*names)

    def saves(self, module: str) -> bool:
        """Whether the adapter is meant to replace this module."""
        return _has_end_of(module, self.modules_to_save)

    def canonical(self) -> bytes:
        """The settings as text, the same for equal settings."""
        fields = {
            "rank": self.rank,
            "alpha": self.alpha,
            "uses_rslora": self.uses_rslora,
            # The order of patterns matters: the first one that matches counts.
            "rank_pattern": list(self.rank_pattern.items()),
            "alpha_pattern": list(self.alpha_pattern.items()),
            "has_lora_bias": self.has_lora_bias,
            "target_modules": self.target_modules
            if isinstance(self.target_modules, str)
            else sorted(self.target_modules),
            "modules_to_save": sorted(self.modules_to_save),
        }
        if self.target_parameters:
            fields["target_parameters"] = {of: sorted(names) for of, names in self.target_parameters.items()}
        return json.dumps(fields, sort_keys=True).encode()


def _has_end_of(module: str, names: frozenset[str]) -> bool:
    """Whether a module's name, or the end of it from one of its parts on, is among the names."""
    return any(end in names for end in _ends_of(module))


def _ends_of(module: str) -> Iterator[str]:
    """A module's name, and the ends of it from each of its parts on."""
    parts = module.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


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
        target_parameters=read["target_parameters"],
        base_model=_printable(given.get("base_model_name_or_path")),
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


def _printable(value: object) -> str:
    """A text that can be shown and sent to anybody; empty for any other one."""
    return value[:256] if isinstance(value, str) and value.isprintable() else ""


def _rank(path: Path, name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST_RANK:
        raise _wrong(path, name, f"a whole number from 1 to {_LARGEST_RANK}", value)
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or type(value) is bool or not -_LARGEST_ALPHA <= value <= _LARGEST_ALPHA:
        raise _wrong(path, name, f"a number from {-_LARGEST_ALPHA:g} to {_LARGEST_ALPHA:g}", value)
    return float(value)


def _flag(path: Path, name: str, value: object) -> bool:
    if value is not None and type(value) is not bool:
        raise _wrong(path, name, "true or false", value)
    return bool(value)


def _initialisation(path: Path, name: str, value: object) -> None:
    """Refuse ways to begin a training that change the base model: the adapter is right with the changed one alone."""
    if value is not None and type(value) is not bool and value not in _KEEPS_BASE:
        raise AdapterRefused(
            f"{path} sets {name} to {_short(value)}, with which PEFT may change the weights of the base model; convert "
            "the adapter when it is saved (path_initial_model_for_weight_conversion), or merge it into its base model"
        )


def _ranks(path: Path, name: str, value: object) -> NamePatterns[int]:
    return _patterns(path, name, value, _rank)


def _alphas(path: Path, name: str, value: object) -> NamePatterns[float]:
    return _patterns(path, name, value, _alpha)


def _patterns(path: Path, name: str, value: object, reader: Callable[[Path, str, object], T]) -> NamePatterns[T]:
    if value is not None and not isinstance(value, dict):
        raise _wrong(path, name, "an object", value)
    try:
        return NamePatterns({pattern: reader(path, name, number) for pattern, number in (value or {}).items()})
    except UnsoundPattern as error:
        raise AdapterRefused(f"{path}: {name} {error}") from error


def _targets(path: Path, name: str, value: object) -> frozenset[str] | str:
    return value if isinstance(value, str) else _names(path, name, value)


def _names(path: Path, name: str, value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or len(value) > _MOST_NAMES or not all(isinstance(item, str) for item in value):
        raise _wrong(path, name, f"a list of at most {_MOST_NAMES} names", value)
    return frozenset(value)


def _parameters(path: Path, name: str, value: object) -> Mapping[str, frozenset[str]]:
    parameters: dict[str, set[str]] = {}
    for parameter in _names(path, name, value):
        module, _, own = parameter.rpartition(".")
        parameters.setdefault(module, set()).add(own)
    return {module: frozenset(names) for module, names in parameters.items()}


_READERS = {
    "peft_type": lambda _path, _name, value: value,
    "r": _rank,
    "lora_alpha": _alpha,
    "init_lora_weights": _initialisation,
    "use_rslora": _flag,
    "rank_pattern": _ranks,
    "alpha_pattern": _alphas,
    "lora_bias": _flag,
    "target_modules": _targets,
    "modules_to_save": _names,
    "target_parameters": _parameters,
    "fan_in_fan_out": _flag,
}
