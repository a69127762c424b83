"""The costs of all candidates in columns, so that a choice looks at hundreds of nodes in a few vector operations.

`cost_model.cheapest` defines what is chosen, node by node; this module computes the same with numpy, and tests compare
the two: the same nodes, to the last bit of the same sums. Between two choices only the rows of nodes that have reported
something, or were given work, are computed again. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import compress
from operator import is_not
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.deadlines import Deadlines
from baton.messages.kv_cache import KVFormat
from baton.messages.node import Role
from router.placement.cache_view import KeyScheme, key_scheme_of
from router.placement.cost_model import (
    HANDOFF_MS,
    LEAST_LEFT,
    PULL_MS,
    SAME_MS,
    SAME_SHARE,
    WORK_SHARE,
    NodeCosts,
    PlacementQuery,
    Way,
    chunk_of,
    is_close,
    is_quicker,
    may_keep_stream,
    reason_of_pair,
    share_grows_at,
)
from router.placement.placement import (
    Candidate,
    Candidates,
    Demand,
    NodeSize,
    Origin,
    size_of,
    takes_no_stream,
)
from router.placement.reasons import CHEAPER_ALONE, STAYS, Reason

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
RowMask: TypeAlias = Bools | None
"""True for each row that may be chosen; None: all of them."""

_RANK_BITS = 24
"""The low bits of `_order`, which order nodes that were chosen at the same time by their incarnations."""


class CostTable:
    """The costs of the candidates, one row for each, prefill nodes first."""

    def __init__(self, costs_of: Callable[[Candidate, float, bool], NodeCosts]) -> None:
        """`costs_of(candidate, now, prefills_only)` computes the costs of a node."""
        self._costs_of = costs_of
        self._candidates: Sequence[Candidate] = ()
        """The candidates as they were set last."""
        self._of_row: list[Candidate] = []
        """The same candidates in the order of the rows."""
        self._row_of: dict[str, int] = {}
        """The row of each incarnation."""
        self._rows_of_name: dict[str, list[int]] = {}
        self._costs: list[NodeCosts] = []
        self._stale: set[int] = set()
        """Rows whose costs are to be computed again."""
        self._young: Deadlines[int] = Deadlines()
        """When the share of each new node grows next, by row."""
        self._prefills_only = False
        self._num_prefills = 0
        self._common_chunk: int | None = None
        """The chunk of all nodes, if it is the same; else None."""
        self._sizes: dict[NodeSize, int] = {}
        self._kinds: dict[KVFormat, int] = {}
        self._versions: dict[str, int] = {}
        """The number of each `NodeDescription.bits` in `_version`."""
        self._families: dict[str, int] = {}
        """The number of each `NodeDescription.family` in `_family`."""
        self._fits_across: Bools | None = None
        """Which kinds fit each other across numerics; None: to be found out when it is needed."""
        self._fits = np.ones((0, 0), np.bool_)
        """Which kinds fit each other."""
        self._all_fit = True
        self.key_schemes: frozenset[KeyScheme] = frozenset()
        """The key schemes of the candidates."""
        self._make_columns(0)

    def _make_columns(self, count: int) -> None:
        self._terms = np.zeros((10, count))
        self._queue_ms, self._step_ms, self._token_ms = self._terms[:3]
        self._streams, self._decode_ms, self._kv_token_ms = self._terms[3:6]
        self._worked_ms, self._worked_at, self._waiting_ms, self._stream_ms = self._terms[6:]
        self._chunk, self._order = np.ones(count, np.int64), np.zeros(count, np.int64)
        self._rank, self._kind, self._size = (np.zeros(count, np.int64) for _ in range(3))
        self._full, self._left_out = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self._no_stream = np.zeros(count, np.bool_)
        self._full_rows, self._left_out_rows = set[int](), set[int]()
        """The rows that are True in `_full` and in `_left_out`: mostly none."""
        self._version, self._family = np.zeros(count, np.int64), np.zeros(count, np.int64)

    # --- keeping the rows up to date ---

    def mark_stale(self, incarnation: str) -> None:
        """Compute the costs of this node again before the next choice."""
        row = self._row_of.get(incarnation)
        if row is not None:
            self._stale.add(row)

    def set_candidates(self, candidates: Sequence[Candidate]) -> None:
        """Replace the candidates."""
        before = self._candidates
        if candidates is before:
            return
        self._candidates = candidates
        changed = candidates.changed_since(before) if isinstance(candidates, Candidates) else None
        if changed is None and len(candidates) == len(before):
            changed = [*compress(candidates, map(is_not, candidates, before))]
        if changed is None or not all(self._is_known(candidate) for candidate in changed):
            self._begin_anew()
            return
        for candidate in changed:
            self._note_candidate(self._row_of[candidate.node.incarnation], candidate)

    def _is_known(self, candidate: Candidate) -> bool:
        row = self._row_of.get(candidate.node.incarnation)
        return row is not None and self._of_row[row].node is candidate.node

    def _begin_anew(self) -> None:
        candidates = self._of_row = sorted(self._candidates, key=lambda entry: entry.node.role is not Role.PREFILL)
        self._make_columns(len(candidates))
        self._row_of = {candidate.node.incarnation: row for row, candidate in enumerate(candidates)}
        self._num_prefills = sum(candidate.node.role is Role.PREFILL for candidate in candidates)
        self._sizes, self._kinds, self._versions, self._families, self._rows_of_name = {}, {}, {}, {}, {}
        for row, candidate in enumerate(candidates):
            node = candidate.node
            self._size[row] = self._sizes.setdefault(size_of(node), len(self._sizes))
            self._kind[row] = self._kinds.setdefault(KVFormat.of(node), len(self._kinds))
            self._version[row] = self._versions.setdefault(node.bits, len(self._versions))
            self._family[row] = self._families.setdefault(node.family, len(self._families))
            self._chunk[row] = chunk_of(node)
            self._rows_of_name.setdefault(node.node_id, []).append(row)
        self._fits, self._fits_across = fitting_kinds([*self._kinds]), None
        self._all_fit = bool(self._fits.all())
        for rank, incarnation in enumerate(sorted(self._row_of)):
            self._rank[self._row_of[incarnation]] = rank
        chunks = {*self._chunk.tolist()}
        self._common_chunk = chunks.pop() if len(chunks) == 1 else None
        all_keys = (key_scheme_of(candidate.node) for candidate in candidates)
        self.key_schemes = frozenset(keys for keys in all_keys if keys is not None)
        self._costs = [None] * len(candidates)  # type: ignore[list-item]  # every row is stale
        self._stale.clear()
        self._young = Deadlines()
        for row, candidate in enumerate(candidates):
            self._note_candidate(row, candidate)

    def _note_candidate(self, row: int, candidate: Candidate) -> None:
        self._of_row[row] = candidate
        self._full[row] = is_full = candidate.lack is not None
        self._left_out[row] = is_left_out = candidate.is_left_out
        self._no_stream[row] = is_full and takes_no_stream(candidate)
        (self._full_rows.add if is_full else self._full_rows.discard)(row)
        (self._left_out_rows.add if is_left_out else self._left_out_rows.discard)(row)
        self._order[row] = candidate.last_chosen << _RANK_BITS | int(self._rank[row])
        self._stale.add(row)

    def refresh(self, able: RowMask, now: float) -> None:
        """Compute stale costs again, for a choice among these rows."""
        split = self._num_prefills
        has_both = _any(able, slice(0, split)) and _any(able, slice(split, len(self._of_row)))
        if has_both is not self._prefills_only:
            self._prefills_only = has_both
            self._stale.update(range(split))
        self._stale.update(self._young.take_due(now))
        if self._stale:
            self._compute(now)

    def _compute(self, now: float) -> None:
        for row in self._stale:
            candidate = self._of_row[row]
            costs = self._costs[row] = self._costs_of(candidate, now, self._prefills_only and row < self._num_prefills)
            # Row by row, since the rows are few: putting them together first takes as long as writing three of them.
            self._terms[:, row] = (
                costs.queue_ms,
                costs.step_ms,
                costs.token_ms,
                costs.streams,
                costs.decode_ms,
                costs.kv_token_ms,
                costs.work.prompt_ms,
                costs.work.at,
                costs.waiting_ms,
                costs.stream_ms,
            )
            if costs.share < 1.0:
                self._young.set(row, share_grows_at(candidate.attached_at, now))
            else:
                self._young.clear(row)
        self._stale.clear()

    # --- which rows may be chosen ---

    def fitting_rows(self, demand: Demand, exclude: Set[str], *, with_room: bool) -> RowMask:
        """The rows of nodes on which the request fits, as in `placement.fitting_nodes`; no row where that raises.

        `with_room`: without full nodes, unless all nodes of a role that may serve it are full.
        """
        able = self._may_serve(demand.origin)
        if with_room and self._full_rows:
            full, split = self._full, self._num_prefills
            if _any(able, slice(0, split)):
                # Prompts that a decode node has to compute keep no hand-off from it.
                full = np.concatenate((full[:split], self._no_stream[split:]))
            able = self._unless_all_of_a_role(~full if able is None else able & ~full, able)
        holds = [size.holds(demand) for size in self._sizes]
        if not all(holds):
            fits = np.array(holds)[self._size]
            able = fits if able is None else able & fits
        if demand.adapter:
            has_adapter = np.array([demand.adapter in candidate.adapters for candidate in self._of_row], np.bool_)
            able = has_adapter if able is None else able & has_adapter
        if demand.origin is not None and (only := demand.origin.incarnation):
            exclude = exclude - {only}
            if able is not None and not able[self._rows_with([only])].any():
                able = np.zeros(len(self._of_row), np.bool_)
        excluded = self._rows_with(exclude)
        if excluded:
            left = self._without(excluded, able)
            able = left if left.any() else able
        return able

    def _may_serve(self, origin: Origin | None) -> RowMask:
        """The rows that `placement.may_serve` allows."""
        if origin is not None:
            able: Bools = self._version == self._versions.get(origin.bits, -1)
            if origin.is_mixed and origin.family:
                able |= self._family == self._families.get(origin.family, -1)
            if origin.incarnation:
                rows = [row for row in self._rows_with([origin.incarnation]) if able[row]]
                has_decode = any(row >= self._num_prefills for row in rows)
                able[self._num_prefills if has_decode else 0 :] = False
                able[rows] = True
            return able
        return ~self._left_out if self._left_out_rows else None

    def _unless_all_of_a_role(self, left: Bools, able: RowMask) -> Bools:
        """The rows `left` of those that are `able`; of a role that has none of them left, all that are able."""
        for of_role in (slice(0, self._num_prefills), slice(self._num_prefills, len(self._of_row))):
            if not left[of_role].any():
                left[of_role] = True if able is None else able[of_role]
        return left

    def _rows_with(self, incarnations: Iterable[str]) -> list[int]:
        return [row for incarnation in incarnations if (row := self._row_of.get(incarnation)) is not None]

    def _without(self, rows: Sequence[int], able: RowMask) -> Bools:
        left = np.ones(len(self._of_row), np.bool_) if able is None else able.copy()
        left[rows] = False
        return left

    def costs(self, able: RowMask) -> Sequence[NodeCosts]:
        """The costs of the candidates that may be chosen."""
        return self._costs.copy() if able is None else [*compress(self._costs, able.tolist())]

    # --- choosing ---

    def cheapest(self, query: PlacementQuery, able: RowMask) -> Way | None:
        """The same as `cost_model.cheapest` for a query about these rows."""
        able = self._not_passed_over(query.passed_over, able)
        split = self._num_prefills
        prefills, decodes = slice(0, split), slice(split, len(self._of_row))
        has_prefills = _any(able, prefills)
        has_decodes = _any(able, decodes)
        if query.demand.embeds:
            return self._cheapest_alone(query, prefills if has_prefills else decodes, able, None)
        pair = self._cheapest_pair(query, prefills, decodes, able) if has_prefills and has_decodes else None
        if query.may_stay and pair is not None and self._is_crowded(query, pair, decodes, able):
            may_keep = np.array([may_keep_stream(candidate) for candidate in self._of_row], np.bool_)
            stay = self._cheapest_alone(query, prefills, may_keep if able is None else able & may_keep, STAYS)
            if stay is not None and is_quicker(query, stay, pair):
                return stay
        alone_on = decodes if has_decodes else prefills
        alone = self._cheapest_alone(query, alone_on, able, None if pair is None else CHEAPER_ALONE)
        if pair is None or alone is None:
            return pair or alone
        return alone if alone.key(query) < pair.key(query) else pair

    def _is_crowded(self, query: PlacementQuery, pair: Way, decodes: slice, able: RowMask) -> bool:
        """Whether the decode nodes have no room for another stream, or one there would be close to its target."""
        no_stream = self._no_stream[decodes] if able is None else self._no_stream[decodes][able[decodes]]
        return bool(no_stream.all()) or is_close(query, pair)

    def _not_passed_over(self, passed_over: Set[str], able: RowMask) -> RowMask:
        rows = self._rows_with(passed_over) if passed_over else ()
        if not rows:
            return able
        return self._unless_all_of_a_role(self._without(rows, able), able)

    def _cheapest_pair(self, query: PlacementQuery, prefills: slice, decodes: slice, able: RowMask) -> Way | None:
        able_prefills, able_decodes = _part(able, prefills), _part(able, decodes)
        fits = self._fits
        if query.across:
            if self._fits_across is None:
                self._fits_across = fitting_kinds([*self._kinds], across=True)
            fits = self._fits_across
        if not self._all_fit:
            kinds = self._kind[decodes] if able_decodes is None else self._kind[decodes][able_decodes]
            partnered = np.isin(self._kind[prefills], np.flatnonzero(fits[np.unique(kinds)].any(axis=0)))
            able_prefills = partnered if able_prefills is None else able_prefills & partnered
        bad = query.pairs_passed_over
        if bad:
            able_prefills = self._with_partners(bad, fits, able_prefills, able_decodes)
        left, work_ms = self._prompt_work(query, prefills)
        queue_ms, most_ms = self._queue_ms[prefills], query.level.first_token_ms
        missed = (queue_ms + work_ms > most_ms).astype(np.int64) if most_ms < np.inf else None
        cost, streams = queue_ms + work_ms * (1 + WORK_SHARE), self._streams[prefills]
        if streams.any():
            cost += streams * self._token_ms[prefills] * left
            if query.level.token_ms < np.inf:
                pace_ms = self._pace_ms(prefills, self._token_ms[prefills] * left, query.now)
                slows = (streams > 0.0) & (pace_ms > query.level.token_ms)
                missed = slows.astype(np.int64) if missed is None else missed + slows
        row = self._best(prefills, cost, missed, able_prefills)
        if row is None:
            return None
        prefill = self._costs[row]
        if not self._all_fit:
            fitting = fits[self._kind[row]][self._kind[decodes]]
            able_decodes = fitting if able_decodes is None else able_decodes & fitting
        if bad:
            partners = self._partners(prefill.node.node_id, bad, able_decodes)
            able_decodes = partners if partners.any() else able_decodes
        uncached = query.uncached(prefill)
        last_chunk = min(uncached, prefill.chunk)
        prefill_ms = prefill.prefill_ms(uncached, query.pulled(prefill))
        to_move: Ints | int = query.demand.num_prompt_tokens
        if not query.across:
            to_move = self._uncached(query, decodes, at_least=0)
        kv_token_ms = self._kv_token_ms[decodes]
        decode_ms, most_ms = self._decode_ms[decodes], query.level.token_ms
        missed = (self._pace_ms(decodes, 0.0, query.now) > most_ms).astype(np.int64) if most_ms < np.inf else None
        least = min(to_move, last_chunk) if isinstance(to_move, int) else np.minimum(to_move, last_chunk)
        handoff_ms = np.maximum(kv_token_ms * least, kv_token_ms * to_move - prefill_ms)
        row = self._best(decodes, decode_ms * query.output_tokens + HANDOFF_MS + handoff_ms, missed, able_decodes)
        assert row is not None  # there is one that fits the prefill node
        decode = self._costs[row]
        return Way(prefill, decode, query.pair_terms(prefill, decode), reason_of_pair(query))

    def _partners(self, prefill: str, pairs: Set[tuple[str, str]], able: RowMask) -> Bools:
        """The decode nodes among `able` whose pair with this prefill node is not passed over."""
        split = self._num_prefills
        bad = [row for first, name in pairs if first == prefill for row in self._rows_of_name.get(name, ())]
        left = np.ones(len(self._of_row) - split, np.bool_) if able is None else able.copy()
        left[[row - split for row in bad if row >= split]] = False
        return left

    def _with_partners(self, pairs: Set[tuple[str, str]], fits: Bools, able: RowMask, able_decodes: RowMask) -> RowMask:
        """The prefill nodes that have such a decode node, if there are any; else all that are able."""
        split = self._num_prefills
        left = np.ones(split, np.bool_) if able is None else able.copy()
        for name in {first for first, _ in pairs}:
            partners = self._partners(name, pairs, able_decodes)
            for row in self._rows_of_name.get(name, ()):
                if row < split and not (partners & fits[self._kind[row]][self._kind[split:]]).any():
                    left[row] = False
        return left if left.any() else able

    def _cheapest_alone(self, query: PlacementQuery, rows: slice, able: RowMask, reason: Reason | None) -> Way | None:
        """The cheapest of these nodes for all of a request. `reason`: None if there is no pair to compare with."""
        able_rows = _part(able, rows)
        left, work_ms = self._prompt_work(query, rows)
        if reason is CHEAPER_ALONE:
            most = query.alone_tokens
            if isinstance(left, int):
                if left > most:
                    return None
            else:
                short = left <= most
                able_rows = short if able_rows is None else able_rows & short
            if self._full_rows:
                free = ~self._full[rows] | self._no_stream[rows]
                able_rows = free if able_rows is None else able_rows & free
        queue_ms, decode_ms, level = self._queue_ms[rows], self._decode_ms[rows], query.level
        missed = None
        if level.first_token_ms < np.inf:
            missed = (queue_ms + work_ms > level.first_token_ms).astype(np.int64)
        if level.token_ms < np.inf:
            slows = (self._pace_ms(rows, self._token_ms[rows] * left, query.now) > level.token_ms) * 2
            missed = slows if missed is None else missed + slows
        stall_ms = self._streams[rows] * self._token_ms[rows] * left
        cost = queue_ms + work_ms * (1 + WORK_SHARE) + stall_ms + decode_ms * query.output_tokens
        row = self._best(rows, cost, missed, able_rows)
        if row is None:
            return None
        costs = self._costs[row]
        return Way(None, costs, query.alone_terms(costs), reason)

    def _pace_ms(self, rows: slice, more_ms: Floats | float, now: float) -> Floats:
        """The time per output token on each node with so much more of its time for prompts: `NodeCosts.pace_ms`."""
        stream_ms = self._stream_ms[rows]
        worked_ms = self._worked_ms[rows] * np.exp(np.minimum(0.0, self._worked_at[rows] - now) * 1e3 / stream_ms)
        share = (worked_ms + self._waiting_ms[rows] + more_ms) / stream_ms
        pace_ms: Floats = self._decode_ms[rows] / np.maximum(LEAST_LEFT, 1.0 - share)
        return pace_ms

    def _uncached(self, query: PlacementQuery, rows: slice, at_least: int = 1) -> Ints | int:
        """The prompt tokens that each node has to compute, or to read; one number if no node has any cached."""
        tokens = query.demand.num_prompt_tokens
        left: Ints | None = None
        for incarnation, cached in query.cached.items():
            row = self._row_of.get(incarnation)
            if row is not None and rows.start <= row < rows.stop:
                if left is None:
                    left = np.full(rows.stop - rows.start, tokens, np.int64)
                left[row - rows.start] = max(at_least, tokens - cached)
        return tokens if left is None else left

    def _prompt_work(self, query: PlacementQuery, rows: slice) -> tuple[Ints | int, Floats]:
        """The prompt tokens that each node has to compute, and the time for them and for what it pulls."""
        left, held = self._uncached(query, rows), query.held
        if held is None:
            return left, self._work_ms(left, rows)
        kv_token_ms, tokens = self._kv_token_ms[rows], query.demand.num_prompt_tokens
        most = max(1, tokens - held.num_tokens)
        more = left - most
        gain_ms = np.maximum(more, 0) * (self._token_ms[rows] - kv_token_ms)
        pulls = np.broadcast_to(more > 0, gain_ms.shape).copy() if held.always else gain_ms > PULL_MS
        if len(self._kinds) > 1:
            pulls &= self._kind[rows] == self._kinds.get(held.kv_format, -1)
        if not pulls.any():
            return left, self._work_ms(left, rows)
        left = np.where(pulls, most, left)
        work_ms = self._work_ms(left, rows) + np.where(pulls, PULL_MS + more * kv_token_ms, 0.0)
        return left, work_ms

    def _work_ms(self, left: Ints | int, rows: slice) -> Floats:
        """The time to compute so many tokens of a prompt on each node: `NodeCosts.prefill_ms`."""
        chunk = self._chunk[rows] if self._common_chunk is None else self._common_chunk
        work_ms: Floats = self._step_ms[rows] * -(-left // chunk) + self._token_ms[rows] * left
        return work_ms

    def _best(self, rows: slice, cost: Floats, missed: Ints | None, able: RowMask) -> int | None:
        """The row that was unused for longest among those that cost about the same; None if no row is able."""
        if able is not None:
            if not able.any():
                return None
            cost = np.where(able, cost, np.inf)
        if missed is not None:
            least_missed = (missed if able is None else missed[able]).min()
            cost = np.where(missed == least_missed, cost, np.inf)
        least: float = cost.item(cost.argmin())
        near: Ints = (cost <= least + SAME_MS + SAME_SHARE * least).nonzero()[0]
        if near.size == 1:
            return int(rows.start) + int(near[0])
        return int(rows.start) + int(near[self._order[rows][near].argmin()])


def fitting_kinds(kinds: Sequence[KVFormat], *, across: bool = False) -> npt.NDArray[np.bool_]:
    """Which of these formats fit each other: [kinds, kinds]. Compares those only whose model and dtype are equal."""
    fits = np.zeros((len(kinds), len(kinds)), np.bool_)
    alike: dict[KVFormat, list[int]] = {}
    for index, kind in enumerate(kinds):
        alike.setdefault(kind._replace(block_size=0, numerics="", kv_shape=""), []).append(index)
    for same in alike.values():
        for row in same:
            fits[row, same] = [kinds[row].fits(kinds[other_kind], across=across) for other_kind in same]
    return fits


def _any(able: RowMask, rows: slice) -> bool:
    return bool(rows.stop > rows.start and (able is None or able[rows].any()))


def _part(able: RowMask, rows: slice) -> RowMask:
    if able is None:
        return None
    part = able[rows]
    return None if part.all() else part
