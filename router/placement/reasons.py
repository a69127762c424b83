"""Why a request was placed on its nodes: a sentence for operators, and a code that counts decisions of one kind."""

from __future__ import annotations

from typing import NamedTuple

from baton.messages.kv_cache import KVFormat
from baton.messages.node import Role


class Reason(NamedTuple):
    """Why the nodes of a placement were chosen."""

    code: str
    """The label of metrics: the same for all decisions of one kind, whatever their nodes are."""
    text: str
    """A part of a sentence. It may name nodes."""


LEAST_LOADED = Reason("least_loaded_pair", "least loaded pair")
IN_TURN = Reason("in_turn", "in turn")
CHEAPEST_PAIR = Reason("cheapest_pair", "cheapest pair")
ACROSS_NUMERICS = Reason("pair_across_numerics", "no pair of equal numerics can serve it: it is not bit-exact")
CHEAPER_ALONE = Reason("cheaper_on_one_node", "cheaper on one node")
STAYS = Reason("stays_where_its_prompt_is", "decode nodes are full, or close to their target of the time per token")
EMBEDDING = Reason("an_embedding_takes_one_node", "an embedding takes one node")
MOVED = Reason("moved", "moved there while it was decoded")
ADOPTED = Reason("adopted", "adopted: another router placed it there")
ADOPTED_FROM_RECORD = Reason("adopted_from_another_router", "adopted from another router")


def no_pair_agrees(prefill: KVFormat, decode: KVFormat) -> Reason:
    """There are nodes of both roles, with these formats of KV, and no two of them fit."""
    return Reason("no_pair_agrees_on_its_KV", f"no pair agrees on its KV: {prefill} and {decode}")


def no_node_left(missing: Role, note: str) -> Reason:
    """There is no node of this role. `note`: what follows in the sentence, beginning with a blank; may be empty."""
    return Reason(f"no_{missing.value}_node_is_left", f"no {missing.value} node is left{note}")
