"""Whether rows are fetched: while that is faster than the encoder here, within the time that the encoder would need."""

from __future__ import annotations

from baton.node.encoding import AVOID_S, FORGET_S, PATIENCE, SHORTEST_S, UNKNOWN_S, FetchPolicy


def test_rows_are_fetched_while_nothing_is_known() -> None:
    policy = FetchPolicy()
    assert policy.seconds_for("n", 100, 0.0) == UNKNOWN_S
    policy.fetched(100, 5.0, 0.0)
    assert policy.seconds_for("n", 100, 0.0) == UNKNOWN_S


def test_a_fetch_gets_the_time_that_the_encoder_would_need() -> None:
    policy = FetchPolicy()
    policy.encoded(100, 0.5)
    assert policy.seconds_for("n", 200, 0.0) == 1.0
    assert policy.seconds_for("n", 1, 0.0) == SHORTEST_S


def test_what_is_slower_than_the_encoder_is_tried_again_after_a_while() -> None:
    policy = FetchPolicy()
    policy.encoded(100, 0.5)
    policy.fetched(100, 0.4, 1.0)
    assert policy.seconds_for("n", 100, 1.0) is not None
    for _ in range(9):
        policy.fetched(100, 0.6, 2.0)
    assert policy.seconds_for("n", 100, 2.0) is None
    assert policy.seconds_for("n", 100, 1.9 + FORGET_S) is None
    assert policy.seconds_for("n", 100, 2.0 + FORGET_S) is not None


def test_the_times_of_late_count_more_than_earlier_ones() -> None:
    policy = FetchPolicy()
    policy.encoded(1, 10.0)
    for _ in range(40):
        policy.encoded(1, 1.0)
    seconds = policy.seconds_for("n", 1, 0.0)
    assert seconds is not None
    assert 1.0 <= seconds < 1.01


def test_a_node_that_failed_is_not_asked_for_a_while_and_others_are() -> None:
    policy = FetchPolicy()
    policy.failed("n", 5.0)
    assert policy.seconds_for("n", 100, 4.9 + AVOID_S) is None
    assert policy.seconds_for("m", 100, 5.0) is not None
    assert policy.seconds_for("n", 100, 5.0 + AVOID_S) is not None


def test_what_is_kept_of_failed_nodes_is_bounded() -> None:
    policy = FetchPolicy()
    for number in range(1000):
        policy.failed(f"n{number}", 0.0)
    assert sum(policy.seconds_for(f"n{number}", 1, 1.0) is None for number in range(1000)) == 64
    policy.failed("later", AVOID_S)
    assert policy.seconds_for("later", 1, AVOID_S) is None


def test_an_encode_node_gets_more_time_than_the_encoder_here_and_is_avoided_for_one_tenant() -> None:
    policy = FetchPolicy()
    assert policy.seconds_for("e", 100, 0.0, makes=True) == UNKNOWN_S
    policy.encoded(100, 0.5)
    # It spares this node, so it need not be faster.
    policy.fetched(100, 5.0, 0.0)
    assert policy.seconds_for("e", 200, 0.0, makes=True) == PATIENCE * 1.0
    policy.failed("e", 0.0, "flood")
    assert policy.seconds_for("e", 200, 0.0, makes=True, tenant="flood") is None
    assert policy.seconds_for("e", 200, 0.0, makes=True, tenant="other") is not None
