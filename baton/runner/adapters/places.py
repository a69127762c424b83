"""Where a model computes the modules and parameters that the tensors of adapters name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterFiles, without_wrappers
from baton.runner.adapters.adaptable import (
    AdaptableExperts,
    AdaptableProduct,
    HasProducts,
    ModuleOutputs,
    RowsOfStep,
    held_parameters,
)


class NoPlaceHere(AdapterRefused):
    """This part of a model has no place for the tensors of a name. Another stage may have one."""


_EXPERT = re.compile(r".*\.(0|[1-9]\d{0,8})\.[^.\d][^.]*")
"""A module of one expert, as models had them whose experts are stacked now."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where what the tensors of one name change is computed."""

    product: AdaptableProduct | AdaptableExperts
    number: int
    """The product's number among all of its kind."""
    outputs: ModuleOutputs
    patterns_name: str
    """The name with which patterns of ranks and factors are compared."""
    expert: int | None = None
    """The only expert of a mixture that is changed; None: all experts, whose tensors are stacked, or no mixture's."""

    @property
    def is_stacked(self) -> bool:
        """Whether the tensors of all experts of a mixture are in one."""
        return isinstance(self.product, AdaptableExperts) and self.expert is None

    @property
    def num_stacked(self) -> int:
        """How many experts have their tensors in one."""
        return self.product.num_stacked if isinstance(self.product, AdaptableExperts) and self.is_stacked else 1


class ParameterNames(Protocol):
    """The parameters that the names in files of a model stand for, those of older releases of transformers, too."""

    def parameter_of(self, name: str) -> tuple[str, str | None]:
        """The name of the parameter, and the pattern of the names that are stacked to make it; None: none are."""
        ...

    def stacked_patterns(self, pattern: str) -> list[str]:
        """The patterns of all that is stacked over the outputs of an expert, in their order; empty: it is not known."""
        ...


class Places:
    """The places of a model that adapters may change, the embedding apart. Read-only once it is made."""

    def __init__(self, module: Any, rows: RowsOfStep, names: Callable[[Any], ParameterNames]) -> None:
        """`module`: with all products replaced; they get their numbers, and `rows`. `names`: of this module's files."""
        self.products: list[AdaptableProduct] = []
        self.experts: list[AdaptableExperts] = []
        self.modules: dict[str, Place] = {}
        """By the name of the module."""
        self._parameters: dict[str, dict[str, Place | None]] = {}
        """By the names of a module whose weights are its parameters, and of a parameter."""
        self._names_of = names
        self._module = module
        self._decoder_path: str = getattr(module, "decoder_path", "")
        """The name that the decoder of a text part has in the model that takes images; empty for other models."""
        for path, part in named_parts(module):
            for product in part.products if isinstance(part, HasProducts) else ():
                number = self._attach(product, rows)
                for outputs in product.modules:
                    name = f"{path}.{outputs.module}" if outputs.module else path
                    self.modules[name] = Place(product, number, outputs, name)
            for parameter, adaptable in held_parameters(part).items():
                place = None
                if adaptable is not None:
                    outputs = ModuleOutputs(path, 0, _num_outputs(adaptable))
                    place = Place(adaptable, self._attach(adaptable, rows), outputs, f"{path}.{parameter}")
                self._parameters.setdefault(path, {})[parameter] = place

    def _attach(self, product: AdaptableProduct | AdaptableExperts, rows: RowsOfStep) -> int:
        kind: list[Any] = self.experts if isinstance(product, AdaptableExperts) else self.products
        kind.append(product)
        product.attach(len(kind) - 1, rows)
        return len(kind) - 1

    def own_name(self, name: str) -> str:
        """The name here of what an adapter of the whole model calls `name`: of the text part the decoder is `model`."""
        path = self._decoder_path
        return f"model{name[len(path) :]}" if path and name.startswith(f"{path}.") else name

    def find(self, files: AdapterFiles, name: str) -> Place:
        """The place of an adapter's tensors with this name. Raises AdapterRefused if this model has none for them,
        NoPlaceHere if another stage may have one."""
        place = self._find(files, name)
        if not place.product.computes_all_rows:
            raise AdapterRefused(
                f"{files.directory} changes {name}, which this model does not compute once for each token; "
                "train the adapter without it"
            )
        return place

    def _find(self, files: AdapterFiles, name: str) -> Place:
        if (place := self.modules.get(self.own_name(name))) is not None:
            if not files.config.targets(name):
                raise AdapterRefused(
                    f"{files.directory} names the weight of the layer {name} in target_parameters; name the layer in "
                    "target_modules instead"
                )
            return replace(place, patterns_name=name)
        if self._decoder_path:
            # The names of the text part are no names of files.
            raise NoPlaceHere(f"{files.directory} changes {name}, {self._why_not(self.own_name(name))}")
        wrapped = without_wrappers(name)
        if (parameters := self._parameters.get(wrapped)) is not None:
            return self._parameter(files, name, wrapped, parameters)
        key, pattern = self._names.parameter_of(f"{name}.weight")
        if pattern is not None:
            return self._of_one_expert(files, name, key, pattern)
        renamed = key.removesuffix(".weight")
        if renamed == name or (place := self.modules.get(renamed) or self._weight(renamed)) is None:
            raise NoPlaceHere(f"{files.directory} changes {name}, {self._why_not(name)}")
        return replace(place, patterns_name=name)

    def _parameter(self, files: AdapterFiles, name: str, module: str, parameters: Mapping[str, Place | None]) -> Place:
        targeted = files.config.parameters_of(module)
        meant = [parameter for parameter in parameters if parameter in targeted]
        if not meant:
            if name == module and files.config.targets(name) and (place := self._weight(module)) is not None:
                return replace(place, patterns_name=name)
            raise AdapterRefused(
                f"{files.directory} changes {module}, and its target_parameters name none of {', '.join(parameters)}; "
                "copy both files again"
            )
        for parameter in meant:
            if parameters[parameter] is None:
                raise AdapterRefused(
                    f"{files.directory} changes {module}.{parameter}, which is no weight of a product; train the "
                    "adapter without it"
                )
        # PEFT wraps a module once for each parameter, in the module's order: the last one is outermost.
        depth = name.count(".", len(module))
        place = parameters[meant[-1 - depth]] if depth < len(meant) else None
        if place is None:
            raise AdapterRefused(
                f"{files.directory} has tensors of {name}, and its target_parameters name only {len(meant)} of "
                f"{module}; copy both files again"
            )
        return place

    def _weight(self, module: str) -> Place | None:
        """The place of the weight of a module that was a linear layer in older releases of transformers."""
        place = self._parameters.get(module, {}).get("weight")
        return None if place is None or isinstance(place.product, AdaptableExperts) else place

    def _of_one_expert(self, files: AdapterFiles, name: str, key: str, pattern: str) -> Place:
        """The place of a module that was a linear layer of one expert in older releases of transformers."""
        module, _, parameter = key.rpartition(".")
        place = self._parameters.get(module, {}).get(parameter)
        stacked = self._names.stacked_patterns(pattern)
        number = _EXPERT.fullmatch(name)
        if place is None or not isinstance(place.product, AdaptableExperts) or not stacked or number is None:
            raise NoPlaceHere(f"{files.directory} changes {name}, {self._why_not(name)}")
        expert, count = int(number[1]), place.product.num_experts
        if expert >= count:
            raise AdapterRefused(
                f"{files.directory} changes {name}, and this model has {count} experts; the adapter is of another base "
                "model"
            )
        size = place.product.num_outputs // len(stacked)
        return replace(
            place,
            outputs=ModuleOutputs(module, stacked.index(pattern) * size, size),
            patterns_name=name,
            expert=expert,
        )

    @cached_property
    def _names(self) -> ParameterNames:
        return self._names_of(self._module)

    def _why_not(self, name: str) -> str:
        known = {tuple(_without_numbers(path)) for path in (*self.modules, *self._parameters)}
        if tuple(_without_numbers(name)) in known:
            return "and this model has no such layer; the adapter is of another base model"
        return "which is no product of this model; the adapter is of another base model"


def named_parts(module: Any) -> Iterator[tuple[str, Any]]:
    """All modules of a model, each once, by the shortest of its names.

    The head that shares its weight with the embedding has two names: its own one is shorter.
    """
    seen: set[int] = set()
    for path, part in sorted(module.named_modules(remove_duplicate=False), key=lambda named: len(named[0])):
        if id(part) not in seen:
            seen.add(id(part))
            yield path, part


def _num_outputs(product: AdaptableProduct | AdaptableExperts) -> int:
    if isinstance(product, AdaptableExperts):
        return product.num_outputs
    return sum(outputs.num_outputs for outputs in product.modules)


def _without_numbers(name: str) -> Iterator[str]:
    return (part for part in name.split(".") if not part.isdigit())
