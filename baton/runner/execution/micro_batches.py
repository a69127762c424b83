"""How a step is divided in micro-batches, which go through the stages of a model one behind the other."""

from __future__ import annotations

from collections.abc import Container, Mapping


def divide(counts: Mapping[str, int], drafted: Container[str], num_parts: int) -> list[list[tuple[str, int]]]:
    """Divide a step's tokens in at most `num_parts` parts of nearly equal size, in their order.

    `counts`: the tokens of each request, which may be in several parts, one behind the other; those of a request in
    `drafted` stay together, since they are verified together. Returns for each part requests and their tokens.
    """
    total = sum(counts.values())
    ends = [total * (part + 1) // num_parts for part in range(num_parts)]
    parts: list[list[tuple[str, int]]] = [[] for _ in ends]
    place = part = 0
    for request_id, count in counts.items():
        left = count
        while left:
            while part < num_parts - 1 and place >= ends[part]:
                part += 1
            taken = left if request_id in drafted or part == num_parts - 1 else min(left, ends[part] - place)
            parts[part].append((request_id, taken))
            place += taken
            left -= taken
    return [tokens for tokens in parts if tokens]
