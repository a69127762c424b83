"""Stands for the linear layers, embeddings and experts of a model whose weights stay in their files until packed.

The weights are quantised ones, and plain ones that a rank packs a part of. While recognition (recognition.py) compares
what parts compute, a linear layer computes with a quantised weight as operations do, so that both sides round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from baton.runner.backends.quantized_product import narrow_product, product_of_plain_numbers
from baton.runner.backends.quantized_weight import NarrowWeight, QuantizedWeight
from baton.runner.backends.weight_rows import Weight, WeightOnFile, read_weight, rows_of
from baton.runner.model.stored.absent_weight import AbsentWeight
from baton.runner.model.stored.weight import StoredWeight


class StoredLinear(nn.Linear):
    """A linear layer whose weight is read, and dequantised, whenever `weight` is asked for."""

    def __init__(
        self, stored: StoredWeight, bias: nn.Parameter | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a weight
        self.out_features, self.in_features = stored.shape
        self.register_parameter("bias", bias)
        self.stored = stored
        self.dtype = dtype
        self.device = device
        self._held: NarrowWeight | WeightOnFile | None = None
        self.forgets = False
        """Whether a product is to take little time and memory: the weight is forgotten after each, and what is summed
        for a quantised one is summed in any order."""
        # transformers would otherwise fill the weight with random numbers.
        self._is_hf_initialized = True

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight as plain numbers: [n, k] in the model's dtype."""
        return _plain(self.held(), self.dtype)

    def held(self) -> NarrowWeight | WeightOnFile:
        """The weight as its file has it: a quantised one stays in memory until `forget`, a plain one in the file."""
        if self._held is None:
            self._held = read_packed(self.stored)
        return self._held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x [..., k] and the weight transposed, plus the bias: [..., n]."""
        held = self.held()
        if self.forgets:
            self.forget()
            return quick_product(x, held, self.bias)
        if isinstance(held, WeightOnFile):
            return functional.linear(x, held.read(), self.bias)
        sums = narrow_product(x.reshape(-1, self.in_features), held)
        if self.bias is not None:
            sums = sums + self.bias.float()
        return sums.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def forget(self) -> None:
        """Free the weight; it is read again when it is needed."""
        self._held = None


class StoredEmbedding(nn.Module):
    """An embedding whose weight is in its file, which reads the rows that it is asked for.

    `replace_products` replaces it before a request is computed.
    """

    def __init__(self, stored: StoredWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.stored = stored
        self.dtype = dtype
        self._is_hf_initialized = True

    @property
    def weight(self) -> torch.Tensor:
        """What modules may ask of the weight; it has no numbers."""
        return AbsentWeight.of(torch.empty((), dtype=self.dtype).expand(self.stored.shape), {})

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as plain numbers: [...] to [..., k]."""
        held: Weight = read_packed(self.stored)
        if isinstance(held, WeightOnFile) and held.reads_all:
            held = held.read()
        tokens, places = torch.unique(token_ids, return_inverse=True)
        rows = [_plain(rows_of(held, token, token + 1), self.dtype) for token in tokens.tolist()]
        return torch.cat(rows)[places]


def look_rows_up_in(module: nn.Module, path: str, part: nn.Module) -> None:
    """Let `part` stand for the embedding at `path`, which looks rows of its weight up.

    An embedding whose class does more than that, such as to scale the rows, stays, and has `part` in place of its
    weight.
    """
    embedding = module.get_submodule(path)
    if not isinstance(embedding, nn.Embedding) or type(embedding) is nn.Embedding:
        module.set_submodule(path, part)
        return
    embedding.baton_rows = part
    # Its parts are replaced when their weights are packed.
    take_weight(embedding, lambda token_ids: embedding.baton_rows(token_ids))  # type: ignore[operator]
    # transformers would otherwise fill the weight with random numbers; the buffers it has to fill.
    embedding.weight._is_hf_initialized = True  # type: ignore[attr-defined]


def take_weight(embedding: nn.Module, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Take the weight [N, K] of an embedding, whose rows [..., K] come from `rows` by their numbers, int64 [...]."""

    def looked_up(token_ids: torch.Tensor, _weight: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
        return rows(token_ids)

    def taken(_weight: torch.Tensor, index: Any) -> torch.Tensor:
        if isinstance(index, tuple) and index[1:] == (slice(None),):
            index = index[0]
        return rows(torch.as_tensor(index))

    weight: torch.Tensor = embedding.weight  # type: ignore[assignment]
    answers: dict[Any, Callable[..., Any]] = {functional.embedding: looked_up, torch.Tensor.__getitem__: taken}
    like = torch.empty((), dtype=weight.dtype, device="cpu" if weight.is_meta else weight.device)
    delattr(embedding, "weight")
    object.__setattr__(embedding, "weight", AbsentWeight.of(like.expand(weight.shape), answers))


ExpertWeights: TypeAlias = Mapping[str, Sequence[Sequence[StoredWeight]]]
"""The weights of an experts module by the name of the parameter that they stand for: for every expert those that are
stacked over their outputs (gate and up, or one)."""


def hold_experts(module: nn.Module, weights: ExpertWeights, *, are_transposed: bool = False) -> None:
    """Give a module the weights of its experts, and take the parameters away that they replace, if it has these.

    `are_transposed`: whether the parameters have the weights transposed; then the module multiplies them so.
    """
    for name in weights:
        if hasattr(module, name):
            delattr(module, name)
    object.__setattr__(module, "stored_experts", weights)
    object.__setattr__(module, "stored_transposed", are_transposed)
    object.__setattr__(module, "_is_hf_initialized", True)


def held_experts(module: nn.Module) -> ExpertWeights:
    """The weights of an experts module that are in their files; empty if it has none."""
    held: ExpertWeights = getattr(module, "stored_experts", {})
    return held


def take_experts(module: nn.Module) -> dict[str, Sequence[Sequence[StoredWeight]]]:
    """The weights of an experts module, which holds them no longer."""
    taken = dict(held_experts(module))
    if taken:
        object.__setattr__(module, "stored_experts", {})
    return taken


def read_once(module: nn.Module) -> None:
    """Let a module's quantised weights be unpacked, or quantised, once only: the first reading keeps the codes.

    They take as many bits as packed ones, and are freed with the layer or expert that is packed.
    """
    known: dict[int, StoredWeight] = {}

    def once(stored: StoredWeight) -> StoredWeight:
        # A weight that an embedding and the head share remains one.
        return known.setdefault(id(stored), replace(stored, read=_ReadOnce(stored)))

    for part in module.modules():
        if isinstance(part, StoredLinear | StoredEmbedding):
            part.stored = once(part.stored)
        elif held := held_experts(part):
            kept = {name: [[*map(once, expert)] for expert in experts] for name, experts in held.items()}
            object.__setattr__(part, "stored_experts", kept)


class _ReadOnce:
    """Reads a weight, and keeps what was read; codes of 4 bits two in a byte."""

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored
        self._kept: NarrowWeight | None = None
        self._in_pairs = False

    def __call__(self) -> NarrowWeight | WeightOnFile | torch.Tensor:
        if self._kept is None:
            weight = self._stored.read()
            if isinstance(weight, torch.Tensor | WeightOnFile):
                return weight
            self._kept = weight
            if isinstance(weight, QuantizedWeight) and weight.bits == 4 and weight.shape[1] % 2 == 0:
                self._kept = replace(weight, codes=weight.codes[:, ::2] | weight.codes[:, 1::2] << 4)
                self._in_pairs = True
            return weight
        if not self._in_pairs:
            return self._kept
        pairs = self._kept.codes
        return replace(self._kept, codes=torch.stack((pairs & 15, pairs >> 4), dim=-1).view(self._stored.shape))


def make_experts_plain(module: nn.Module, like: torch.Tensor) -> None:
    """Give a module whose weights of experts are in their files plain parameters again, in the dtype of `like`."""
    with torch.inference_mode(False):  # as other parameters are made
        for name, experts in take_experts(module).items():
            plain = [torch.cat([stored.dequantized() for stored in expert]).to(like) for expert in experts]
            if module.stored_transposed:
                plain = [weight.T for weight in plain]
            module.register_parameter(name, nn.Parameter(torch.stack(plain), requires_grad=False))


class ExpertsOnFile:
    """Stands for a parameter [E, N, K] of experts; of an expert that is asked for the weight is read."""

    def __init__(self, experts: Sequence[Sequence[StoredWeight]]) -> None:
        self.experts = experts

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K, also for a module that has its weights transposed."""
        first = self.experts[0]
        return len(self.experts), sum(stored.shape[0] for stored in first), first[0].shape[1]

    def __getitem__(self, expert: int | torch.Tensor) -> _ExpertOnFile:
        return _ExpertOnFile([read_packed(stored) for stored in self.experts[int(expert)]])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        if func is not torch.bmm or len(args) != 2 or kwargs:
            raise TypeError(f"{func.__name__} of experts' weights that are in their files")
        x, weights = args
        return torch.stack([functional.linear(rows, weights[number]) for number, rows in enumerate(x)])


class _ExpertOnFile:
    """Stands for an expert's weight in products; its parts are stacked over their outputs."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        self._parts = parts

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        if func not in _EXPERT_PRODUCTS or len(args) != 2 or kwargs:
            raise TypeError(f"{func.__name__} of an expert's weight that is in its file")
        x, weight = args
        return torch.cat([quick_product(x, part, None) for part in weight._parts], dim=-1)


_EXPERT_PRODUCTS = (functional.linear, torch.Tensor.matmul, torch.Tensor.__matmul__)
"""How transformers multiplies rows by an expert's weight: [N, K], or transposed with an operator."""


@contextmanager
def experts_on_file(module: nn.Module) -> Iterator[None]:
    """Let the experts of transformers in a module compute with the weights that they hold, read for every use."""
    held = [(part, name, experts) for part in module.modules() for name, experts in held_experts(part).items()]
    for part, name, experts in held:
        object.__setattr__(part, name, ExpertsOnFile(experts))
    try:
        yield
    finally:
        for part, name, _ in held:
            object.__delattr__(part, name)


def quick_product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of x [..., k] and a weight [n, k] transposed, summed in any order: [..., n] in the dtype of x."""
    read = read_weight(weight)
    if isinstance(read, torch.Tensor):
        return functional.linear(x, read, bias)
    sums = product_of_plain_numbers(x.reshape(-1, x.shape[-1]), read)
    if bias is not None:
        sums = sums + bias.float()
    return sums.to(x.dtype).view(*x.shape[:-1], sums.shape[1])


def read_packed(stored: StoredWeight) -> NarrowWeight | WeightOnFile:
    """Read a weight that can be packed as it is; a plain one stays in its file."""
    weight = stored.read()
    if isinstance(weight, torch.Tensor):
        raise TypeError("a weight that has no packed form must be loaded as a plain tensor")
    return weight


def _plain(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """A weight as plain numbers; one in its file is in the model's dtype already."""
    read = read_weight(weight)
    return read if isinstance(read, torch.Tensor) else read.dequantized(dtype)


def weight_of(linear: nn.Linear) -> Weight:
    """The weight of a linear layer as operations pack it: with its scales if it is quantised."""
    return linear.held() if isinstance(linear, StoredLinear) else linear.weight


def halves_of(weight: Weight) -> tuple[Weight, Weight]:
    """The first and the second half of a weight's outputs."""
    half = weight.shape[0] // 2
    return rows_of(weight, 0, half), rows_of(weight, half, 2 * half)


def forget_weights(module: nn.Module) -> None:
    """Free the quantised weights that the layers in a module have read."""
    for part in module.modules():
        if isinstance(part, StoredLinear):
            part.forget()


def widths_of(module: nn.Module) -> set[int]:
    """The widths of the rows that the weights of a module take and give, as far as they are in their files."""
    shapes = [part.stored.shape for part in module.modules() if isinstance(part, StoredLinear | StoredEmbedding)]
    for part in module.modules():
        shapes += [stored.shape for experts in held_experts(part).values() for expert in experts for stored in expert]
    return {width for shape in shapes for width in shape}
