"""The model's card: from the model directory, then from the nodes that serve the model."""

from __future__ import annotations

from dataclasses import replace

from baton.messages.generation import ModelCard
from baton.messages.node_model import GENERATES, GENERATES_AND_EMBEDS, Capability
from baton.messages.sampling import SamplingDefaults
from router.cards import CurrentCard, card_of_nodes
from router.placement.view import ClusterView
from tests.support.router_parts import MODEL, decode, prefill, record_of, view_of

DEFAULTS = SamplingDefaults(temperature=0.5)
KNOWN = ModelCard(MODEL, 1000, 9000, has_end=False, defaults=DEFAULTS, permits_extra_keys=True)


def test_the_card_is_the_known_one_until_a_node_of_the_model_is_attached() -> None:
    view = ClusterView()
    card = CurrentCard(KNOWN, view, lambda: 0.0)
    assert card() == KNOWN
    other = prefill("other", model="another")
    view.registered([record_of(other)])
    view.attached(other, 0.0)
    assert card() == KNOWN
    node = decode(embedding_size=8)
    view.registered([record_of(other), record_of(node)])
    view.attached(node, 0.0)
    fingerprint = card_of_nodes([node], 64, DEFAULTS).fingerprint
    expected = ModelCard(MODEL, 64, 300, True, 8, fingerprint, DEFAULTS, capabilities=GENERATES_AND_EMBEDS)
    assert card() == replace(expected, permits_extra_keys=True)
    restricted = CurrentCard(KNOWN, view, lambda: 0.0, frozenset((Capability.EMBED,)))
    assert restricted().capabilities == GENERATES, "what this router does not take is not offered"


def test_the_card_is_that_of_the_version_that_gets_new_requests() -> None:
    nodes = [prefill("p1"), decode("d1")]
    view = view_of(*nodes, decode("d2", numerics="cuda", vocab_size=9, max_model_len=4096))
    card = CurrentCard(KNOWN, view, lambda: 0.0)
    assert (card().vocab_size, card().max_model_len) == (300, 64)
    assert card().fingerprint == card_of_nodes(nodes, 64, DEFAULTS).fingerprint
    for node in nodes:
        view.detached(node.incarnation, "it left", 0.0)
    assert card().vocab_size == 9


def test_the_length_of_a_node_that_has_just_left_still_counts() -> None:
    view = view_of(decode("short"), decode("long", max_model_len=4096))
    view.detached("long.1", "it left", 0.0)
    assert CurrentCard(KNOWN, view, lambda: 0.0)().max_model_len == 4096


def test_a_card_has_what_all_nodes_can_do() -> None:
    nodes = [prefill(vocab_size=200, eos_token_ids=frozenset()), decode(embedding_size=8)]
    card = card_of_nodes(nodes, 64, DEFAULTS)
    assert (card.vocab_size, card.has_end, card.embedding_size) == (200, False, 8)


def test_the_fingerprint_is_of_the_bits_and_not_of_the_number_of_nodes() -> None:
    def fingerprint(*nodes: str) -> str:
        return card_of_nodes([decode(numerics=numerics) for numerics in nodes], 64, DEFAULTS).fingerprint

    assert fingerprint("cpu", "cuda") == fingerprint("cuda", "cpu", "cpu")
    assert len({fingerprint("cpu"), fingerprint("cuda"), fingerprint("cpu", "cuda")}) == 3
