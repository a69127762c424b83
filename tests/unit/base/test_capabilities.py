"""What a model can do, as names and as a check."""

from __future__ import annotations

import pytest

from baton.errors import UnsupportedRequest
from baton.messages.node_model import EMBEDS, GENERATES, Capability, check_capable, in_order, known_capabilities


def test_names_of_a_newer_version_are_left_out() -> None:
    assert known_capabilities(["lora", "telepathy", "generate"]) == {Capability.LORA, Capability.GENERATE}
    assert in_order({Capability.LORA, Capability.GENERATE}) == ["generate", "lora"]


def test_a_refusal_names_what_is_lacking() -> None:
    check_capable("m", GENERATES, GENERATES | EMBEDS)
    with pytest.raises(UnsupportedRequest, match=r"'m' can't do embed, score; it can generate$"):
        check_capable("m", EMBEDS | {Capability.SCORE, Capability.GENERATE}, GENERATES)
