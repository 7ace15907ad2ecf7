"""The compiled inner loops, and the flat arrays that they work on.

All of them stand in this one file because Numba's cache on disk knows only the file of the function that was called: a compiled function
that is changed elsewhere would go on running as it was. They are compiled at the first call, 18 s once on a machine, and read from the
cache from then on. They hold no lock on Python (``nogil``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLANK_END",
    "HOTWORD_STATE",
    "LM_ENTRY",
    "LM_NODE",
    "MANY_CHILDREN",
    "MARK_BLANK",
    "MARK_TOKEN",
    "NODE",
    "TOKEN_END",
    "Beams",
    "HotwordTables",
    "LmTables",
    "advance",
    "clear",
    "find_key",
    "finish",
    "follow_hotwords",
    "follow_lm",
    "greedy",
    "insert_keys",
    "link_hotwords",
    "load_log_probs",
    "load_top",
    "unwind",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    """Compile at the first call; keep the result on disk where there is a place for it."""
    from numba import njit

    try:
        return cast("_Function", njit(cache=True, nogil=True)(function))
    except RuntimeError:  # neither this directory nor the user's cache can be written
        return cast("_Function", njit(nogil=True)(function))


# Columns of Beams.scores: log-probabilities of a prefix (natural), and what it has earned for good.
BLANK_END: Final = 0  # sum over alignments that end in blank
TOKEN_END: Final = 1  # sum over alignments that end in the prefix's last token
BEST_BLANK: Final = 2  # the best alignment that ends in blank
BEST_TOKEN: Final = 3
HOTWORDS: Final = 4  # for completed hotwords; what an unfinished one has earned comes from its state
LM: Final = 5  # for completed words
PEAK: Final = 6  # of candidates only: the last token's highest log-probability so far
_SCORES: Final = 6

# Columns of Beams.links.
NODE: Final = 0  # where the prefix ends in the slot's tree
MARK_BLANK: Final = 1  # last mark (token time) of the best alignment that ends in blank; -1: no tokens
MARK_TOKEN: Final = 2
HOTWORD_STATE: Final = 3
LM_NODE: Final = 4  # the words before the one in progress
LM_ENTRY: Final = 5  # the word in progress, as far as spelt; -1: no word begins like this
UNIT: Final = 6  # of candidates only: the token that is new; -1: none
MARK: Final = 7  # of candidates only: the mark before the one to be made; _NO_MARK: none to be made
_LINKS: Final = 6
_NO_MARK: Final = -2

# A hypothesis' ceiling is computed in another order than the score that it bounds: they may differ by roundings, never by this.
_SLACK: Final = 1e-9
#: Log-probabilities above this are none: float32's log_softmax never exceeds 0.
_NOT_A_LOG_PROB: Final = 1e-2
#: Tokens looked at together for one that is good enough.
_STRIDE: Final = 32


class Beams(NamedTuple):
    """The state of all slots: S slots of up to H hypotheses and F frames. ``prefix_beam.py`` allocates it.

    Prefixes are nodes of one tree per slot, in which each prefix exists once, so that two are equal if their nodes are. Token times are
    *marks*, chained backwards. Both only grow, by at most H a frame, until the slot is cleared.
    """

    loaded: NDArray[np.int32]  # (S,) frames in top_*
    frames: NDArray[np.int32]  # (S,) frames taken; -1: the slot is closed
    counts: NDArray[np.int32]  # (S,) hypotheses
    scores: NDArray[np.float64]  # (S, H, 6)
    links: NDArray[np.int32]  # (S, H, 6)
    words: NDArray[np.uint64]  # (S, H) hash of the word in progress; 0: none
    nodes: NDArray[np.int32]  # (S,) nodes in the tree
    parents: NDArray[np.int32]  # (S, 1 + H * F)
    units: NDArray[np.int32]  # (S, 1 + H * F) the node's last token; -1 at the root
    depths: NDArray[np.int32]  # (S, 1 + H * F)
    children: NDArray[np.int32]  # (S, a power of two) hash table of nodes by parent and unit; 0: free
    marks: NDArray[np.int32]  # (S,) marks made
    mark_before: NDArray[np.int32]  # (S, H * F)
    mark_frame: NDArray[np.int32]  # (S, H * F)
    mark_peak: NDArray[np.float32]  # (S, H * F) highest log-probability of the token up to that frame
    top_log_probs: NDArray[np.float32]  # (S, F, H) the best tokens of each frame, best first
    top_units: NDArray[np.int32]  # (S, F, H) -1: no more; a skipped frame has the blank only
    has_text: NDArray[np.bool_]  # (S, F) whether the best hypothesis had tokens after that frame
    skipped: NDArray[np.int32]  # (S,) frames taken as blank
    skipped_mass: NDArray[np.float64]  # (S,) sum over them of the probability of all that is not blank


class HotwordTables(NamedTuple):
    """An Aho-Corasick automaton over units. States are numbered breadth first, so that the children of a state stand together.

    Most units lead from most states to where they lead from the root. ``mask``, ``row`` and ``bits`` say at once that they do. A state with
    many children finds the one of a unit by counting the bits before it; others search.
    """

    states: NDArray[np.void]  # (N,) of hotwords.STATE; 0 is the root
    units: NDArray[np.int32]  # (N,) the unit that leads to each state
    roots: NDArray[np.int32]  # (V,) where each unit leads from the root
    root_gains: NDArray[np.float64]  # (V,) partial + output there
    gains: NDArray[np.float64]  # (N,) partial + output of each state
    bits: NDArray[np.uint64]  # (rows, V / 64) a bit for each unit that leads on from a state or from a beginning that it ends with
    own_bits: NDArray[np.uint64]  # (rows, V / 64) a bit for each unit that leads on from the state itself
    own_ranks: NDArray[np.int32]  # (rows, V / 64) children before each 64 units


class LmTables(NamedTuple):
    """A back-off word n-gram and how units spell words. All log-probabilities are natural and unweighted."""

    enabled: bool
    weight: float
    word_bonus: float
    oov_penalty: float
    unknown: int  # the id of <unk>; -1: none
    unknown_log_prob: float  # its unigram; 0: none
    start: int  # the node that sentences begin at
    end: int  # the id of </s>; -1: sentences have no end
    unit_flags: NDArray[np.uint8]  # (V,) ENDS_WORD | SPELLS | CLOSES_WORD
    unit_hashes: NDArray[np.uint64]  # (V,) hash of the unit's text
    unit_powers: NDArray[np.uint64]  # (V,) base ** its length
    entry_keys: NDArray[np.uint64]  # (a power of two,) hashes of all words and their beginnings; 0: free
    entry_words: NDArray[np.int32]  # id of the word that ends here; -1: none does
    entry_best: NDArray[np.float64]  # the best unigram among the words that begin like this
    edge_keys: NDArray[np.uint64]  # (a power of two,) 1 + node * words + word; 0: free
    edge_log_probs: NDArray[np.float64]
    edge_nodes: NDArray[np.int32]
    backoffs: NDArray[np.float64]  # (nodes,) 0 is the empty context
    shorter: NDArray[np.int32]  # (nodes,) the context without its first word
    words: int


ENDS_WORD: Final = 1  # the unit ends the word before it
SPELLS: Final = 2  # it is part of a word
CLOSES_WORD: Final = 4  # it ends its own word: a Chinese character


@_compiled
def _log_add(a: float, b: float) -> float:
    high, low = (a, b) if a >= b else (b, a)
    if low == -math.inf:
        return high
    return high + math.log(1.0 + math.exp(low - high))


@_compiled
def _mix(key: np.uint64) -> np.uint64:
    """Spread a key over 64 bits (the finaliser of splitmix64)."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


@_compiled
def find_key(keys: NDArray[np.uint64], key: np.uint64) -> int:
    """Return where a key other than 0 stands in a hash table whose size is a power of two, or -1."""
    mask = np.uint64(len(keys) - 1)
    at = _mix(key) & mask
    while keys[at] != np.uint64(0):
        if keys[at] == key:
            return int(np.int64(at))
        at = (at + np.uint64(1)) & mask
    return -1


@_compiled
def insert_keys(keys: NDArray[np.uint64], new: NDArray[np.uint64], places: NDArray[np.int64]) -> None:
    """Put keys, all different and none 0, into an empty hash table; ``places`` receives where each stands."""
    mask = np.uint64(len(keys) - 1)
    for index in range(len(new)):
        at = _mix(new[index]) & mask
        while keys[at] != np.uint64(0):
            at = (at + np.uint64(1)) & mask
        keys[at] = new[index]
        places[index] = np.int64(at)


# Hotwords

#: States that more units lead on from have a row with a bit for every unit: in the 64 bits of a mask, most would stand for several.
MANY_CHILDREN: Final = 16


@_compiled
def _bits_set(word: np.uint64) -> int:
    """Return how many bits of a word are 1."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int(np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56)))


@_compiled
def _next_hotword(tables: HotwordTables, state: int, unit: int) -> int:
    """Return the state after a unit: of the longest beginning of a phrase that ends there."""
    while state != 0:
        record = tables.states[state]
        low = int(record.first)
        left = int(record.stop) - low
        if left > MANY_CHILDREN:
            row = record.row
            own = tables.own_bits[row, unit >> 6]
            bit = np.uint64(1) << np.uint64(unit & 63)
            if own & bit:
                return low + int(tables.own_ranks[row, unit >> 6]) + _bits_set(own & (bit - np.uint64(1)))
            state = int(record.jump)
            continue
        while left > 1:
            # Without a branch, which a processor could only guess.
            half = left >> 1
            low += half * (tables.units[low + half] <= unit)
            left -= half
        if left == 1 and tables.units[low] == unit:
            return int(low)
        state = int(record.jump)
    return int(tables.roots[unit])


@_compiled
def link_hotwords(tables: HotwordTables, parents: NDArray[np.int32], fails: NDArray[np.int32]) -> None:
    """Fill in what follows from the trie.

    Args:
        tables: with ``first``, ``stop``, ``partial`` and each state's own phrase as ``output``; states that many units lead on from have
            a ``row``, others -1; ``own_bits`` and ``own_ranks`` are complete. The rest is to be filled in.
        parents: (N,) each state's parent.
        fails: (N,) receives the longest other beginning that each state ends with.
    """
    states = tables.states
    for state in range(1, len(states)):
        parent = parents[state]
        fail = 0
        if parent != 0:
            fail = _next_hotword(tables, int(fails[parent]), int(tables.units[state]))
        fails[state] = fail
        states[state].jump = fail if states[fail].first < states[fail].stop else states[fail].jump
        states[state].output += states[fail].output
        tables.gains[state] = states[state].output + states[state].partial
        if parent == 0:
            tables.root_gains[tables.units[state]] = tables.gains[state]
    for state in range(len(states)):
        best = 0.0 if state == 0 else states[fails[state]].best
        for child in range(states[state].first, states[state].stop):
            best = max(best, tables.gains[child])
        states[state].best = best
        if state == 0:
            continue
        behind = states[fails[state]]
        own = states[state].row
        states[state].mask = behind.mask
        if own < 0:
            states[state].row = behind.row
        elif behind.row >= 0:
            tables.bits[own] |= tables.bits[behind.row]
        for child in range(states[state].first, states[state].stop):
            unit = int(tables.units[child])
            bit = np.uint64(1) << np.uint64(unit & 63)
            if own < 0:
                states[state].mask |= bit
            else:
                tables.bits[own, unit >> 6] |= bit


@_compiled
def follow_hotwords(tables: HotwordTables, units: NDArray[np.int32], earned: NDArray[np.float64], pending: NDArray[np.float64]) -> None:
    """Walk one token sequence; ``earned`` and ``pending`` receive, after each token, what completed and unfinished phrases bring."""
    state = 0
    total = 0.0
    for index in range(len(units)):
        state = _next_hotword(tables, state, int(units[index]))
        total += tables.states[state].output
        earned[index] = total
        pending[index] = tables.states[state].partial


# Language model


@_compiled
def _score_word(lm: LmTables, node: int, word: int) -> tuple[float, int]:
    """Return the log-probability of a known word after a context, and the context that it makes."""
    log_prob = 0.0
    while True:
        edge = find_key(lm.edge_keys, np.uint64(node * lm.words + word + 1))
        if edge >= 0:
            return log_prob + lm.edge_log_probs[edge], int(lm.edge_nodes[edge])
        log_prob += lm.backoffs[node]
        node = int(lm.shorter[node])


@_compiled
def _end_word(lm: LmTables, node: int, entry: int) -> tuple[float, int]:
    """Return what a word that is spelt out brings, weight and bonus included, and the context after it."""
    word = -1 if entry < 0 else int(lm.entry_words[entry])
    bonus = lm.word_bonus
    if word < 0:
        bonus += lm.oov_penalty
        word = lm.unknown
        if word < 0:
            return bonus, 0
    log_prob, node = _score_word(lm, node, word)
    return bonus + lm.weight * log_prob, node


@_compiled
def _pending_word(lm: LmTables, word: np.uint64, entry: int) -> float:
    """Return what a word in progress is counted for: the best that it can become without context, or the penalty if nothing."""
    if word == np.uint64(0):
        return 0.0
    if entry < 0:
        return lm.word_bonus + lm.oov_penalty + lm.weight * lm.unknown_log_prob
    return float(lm.word_bonus + lm.weight * lm.entry_best[entry])


@_compiled
def _spell(lm: LmTables, node: int, word: np.uint64, entry: int, unit: int) -> tuple[float, int, np.uint64, int]:
    """Return what a unit earns by ending words, and the context, word in progress and entry after it."""
    flags = lm.unit_flags[unit]
    earned = 0.0
    if flags & ENDS_WORD and word != np.uint64(0):
        earned, node = _end_word(lm, node, entry)
        word = np.uint64(0)
    if flags & SPELLS:
        word = word * lm.unit_powers[unit] + lm.unit_hashes[unit]
        if word == np.uint64(0):
            word = np.uint64(1)
        entry = find_key(lm.entry_keys, word)
    if flags & CLOSES_WORD:
        more, node = _end_word(lm, node, entry)
        earned += more
        word = np.uint64(0)
    return earned, node, word, entry


@_compiled
def _end_sentence(lm: LmTables, node: int, word: np.uint64, entry: int) -> float:
    """Return what the word in progress and the sentence's end bring."""
    earned = 0.0
    if word != np.uint64(0):
        earned, node = _end_word(lm, node, entry)
    if lm.end >= 0:
        log_prob, node = _score_word(lm, node, lm.end)
        earned += lm.weight * log_prob
    return earned


@_compiled
def follow_lm(lm: LmTables, units: NDArray[np.int32], earned: NDArray[np.float64], pending: NDArray[np.float64]) -> float:
    """Walk one token sequence as ``follow_hotwords`` does; return the score of the whole as a sentence."""
    node = lm.start
    word = np.uint64(0)
    entry = -1
    total = 0.0
    for index in range(len(units)):
        more, node, word, entry = _spell(lm, node, word, entry, int(units[index]))
        total += more
        earned[index] = total
        pending[index] = _pending_word(lm, word, entry)
    return total + _end_sentence(lm, node, word, entry)


# Prefix beam search


@_compiled
def clear(beams: Beams, slots: NDArray[np.int64], lm_start: int) -> None:
    """Begin anew in slots: one hypothesis, the empty prefix. What is loaded stays."""
    for slot in slots:
        beams.frames[slot] = 0
        beams.counts[slot] = 1
        beams.nodes[slot] = 1
        beams.marks[slot] = 0
        beams.skipped[slot] = 0
        beams.skipped_mass[slot] = 0.0
        beams.parents[slot, 0] = -1
        beams.units[slot, 0] = -1
        beams.depths[slot, 0] = 0
        beams.children[slot, :] = 0
        beams.words[slot, 0] = 0
        links = beams.links[slot, 0]
        links[NODE] = 0
        links[MARK_BLANK] = -1
        links[MARK_TOKEN] = -1
        links[HOTWORD_STATE] = 0
        links[LM_NODE] = lm_start
        links[LM_ENTRY] = -1
        scores = beams.scores[slot, 0]
        scores[:] = 0.0
        scores[TOKEN_END] = -math.inf
        # BEST_TOKEN is 0 and not -inf, as in WeNet: the empty prefix has no last token, so that only token times could tell.


@_compiled
def _select(row: NDArray[np.float32], log_probs: NDArray[np.float32], units: NDArray[np.int32]) -> None:
    """Write the best tokens of a frame, best first, of equals the lower id first; -1 where there are no more."""
    wanted = len(units)
    count = 0
    worst = np.float32(-np.inf)
    units[:] = -1
    for first in range(0, len(row), _STRIDE):
        last = min(first + _STRIDE, len(row))
        good = False
        if count == wanted and last - first == _STRIDE:
            for unit in range(first, first + _STRIDE):
                good |= row[unit] > worst
            if not good:
                continue
        for unit in range(first, last):
            value = row[unit]
            if not value > worst:
                continue
            at = count if count < wanted else wanted - 1
            while at > 0 and log_probs[at - 1] < value:
                log_probs[at] = log_probs[at - 1]
                units[at] = units[at - 1]
                at -= 1
            log_probs[at] = value
            units[at] = unit
            if count < wanted:
                count += 1
            if count == wanted:
                worst = log_probs[wanted - 1]


@_compiled
def load_log_probs(
    beams: Beams, slots: NDArray[np.int64], log_probs: NDArray[np.float32], lengths: NDArray[np.int64], blank: int, skip_log_prob: float
) -> int:
    """Keep the best tokens of each frame of ``log_probs`` (n, T, V); return the first row with a frame of no log-probabilities, or -1."""
    for row in range(len(slots)):
        slot = slots[row]
        for index in range(lengths[row]):
            frame = log_probs[row, index]
            at = beams.loaded[slot] + index
            if frame[blank] >= skip_log_prob:
                beams.top_log_probs[slot, at, 0] = frame[blank]
                beams.top_units[slot, at, 0] = blank
                beams.top_units[slot, at, 1:] = -1
            else:
                _select(frame, beams.top_log_probs[slot, at], beams.top_units[slot, at])
            if beams.top_units[slot, at, 0] < 0 or not beams.top_log_probs[slot, at, 0] <= _NOT_A_LOG_PROB:
                return row
    for row in range(len(slots)):
        beams.loaded[slots[row]] += lengths[row]
    return -1


@_compiled
def load_top(
    beams: Beams,
    slots: NDArray[np.int64],
    log_probs: NDArray[np.float32],
    units: NDArray[np.int32],
    lengths: NDArray[np.int64],
    blank: int,
    skip_log_prob: float,
) -> int:
    """As ``load_log_probs``, for frames whose best tokens (n, T, H) are selected already, best first."""
    for row in range(len(slots)):
        slot = slots[row]
        for index in range(lengths[row]):
            at = beams.loaded[slot] + index
            beams.top_log_probs[slot, at] = log_probs[row, index]
            beams.top_units[slot, at] = units[row, index]
            if units[row, index, 0] == blank and log_probs[row, index, 0] >= skip_log_prob:
                beams.top_units[slot, at, 1:] = -1
            if units[row, index, 0] < 0 or not log_probs[row, index, 0] <= _NOT_A_LOG_PROB:
                return row
    for row in range(len(slots)):
        beams.loaded[slots[row]] += lengths[row]
    return -1


@_compiled
def _child(beams: Beams, slot: int, parent: int, unit: int) -> int:
    """Return the node of a prefix and one more token, made if it has never been."""
    table = beams.children[slot]
    mask = np.uint64(len(table) - 1)
    at = _mix((np.uint64(parent) << np.uint64(32)) ^ np.uint64(unit)) & mask
    while table[at] != 0:
        node = table[at]
        if beams.parents[slot, node] == parent and beams.units[slot, node] == unit:
            return int(node)
        at = (at + np.uint64(1)) & mask
    node = beams.nodes[slot]
    beams.nodes[slot] += 1
    beams.parents[slot, node] = parent
    beams.units[slot, node] = unit
    beams.depths[slot, node] = beams.depths[slot, parent] + 1
    table[at] = node
    return int(node)


@_compiled
def _place(
    total: float, order: int, row: int, totals: NDArray[np.float64], orders: NDArray[np.int64], rows: NDArray[np.int64], count: int
) -> int:
    """Put a candidate among the best, sorted by score and, of equals, by who was there first; return how many there are."""
    size = len(totals)
    if count == size:
        if total < totals[size - 1] or (total == totals[size - 1] and order > orders[size - 1]):
            return count
        count -= 1
    at = count
    while at > 0 and (totals[at - 1] < total or (totals[at - 1] == total and orders[at - 1] > order)):
        totals[at] = totals[at - 1]
        orders[at] = orders[at - 1]
        rows[at] = rows[at - 1]
        at -= 1
    totals[at] = total
    orders[at] = order
    rows[at] = row
    return count + 1


@_compiled
def _take_blank(beams: Beams, slot: int, log_prob: float) -> None:
    """Take a frame in which only the blank counts: scores move together, so that the order stays."""
    for hypothesis in range(beams.counts[slot]):
        scores = beams.scores[slot, hypothesis]
        links = beams.links[slot, hypothesis]
        scores[BLANK_END] = _log_add(scores[BLANK_END], scores[TOKEN_END]) + log_prob
        scores[TOKEN_END] = -math.inf
        if not scores[BEST_BLANK] > scores[BEST_TOKEN]:
            scores[BEST_BLANK] = scores[BEST_TOKEN]
            links[MARK_BLANK] = links[MARK_TOKEN]
        scores[BEST_BLANK] += log_prob
        scores[BEST_TOKEN] = -math.inf
        links[MARK_TOKEN] = -1


@_compiled
def advance(beams: Beams, slots: NDArray[np.int64], hotwords: HotwordTables, lm: LmTables, blank: int) -> None:
    """Take all frames of some slots that are loaded and not yet taken.

    Per frame, each prefix may stay (by a blank, or by its last token again) or grow by one of the frame's best tokens; the best H of all
    that result go on. A grown prefix that is itself among the hypotheses is the same prefix: its alignments are added up.
    """
    size = beams.scores.shape[1]
    rows = size + size * size
    scores = np.empty((rows, _SCORES + 1))
    links = np.empty((rows, _LINKS + 2), np.int32)
    words = np.empty(rows, np.uint64)
    totals = np.empty(size)
    orders = np.empty(size, np.int64)
    chosen = np.empty(size, np.int64)
    any_end = np.empty(size)
    best_end = np.empty(size)
    marks = np.empty(size, np.int64)
    last = np.empty(size, np.int64)
    bonus = np.empty(size)
    merged = np.zeros((size, size), np.bool_)
    # Hypotheses differ in their beginnings more than in their ends: what a token brings is looked up once for all that end alike.
    group_states = np.zeros(size, np.int64)
    group_masks = np.zeros(size, np.uint64)
    group_rows = np.zeros(size, np.int64)
    group_ends = np.zeros(size)
    group_best = np.zeros(size)
    group_partial = np.zeros(size)
    group_first = np.zeros(size, np.int64)
    next_member = np.zeros(size, np.int64)
    before = np.empty(size)
    lm_alike = np.zeros(size, np.int64)
    lm_known = np.zeros((size, size), np.bool_)
    lm_next = np.zeros((size, size, 2), np.int64)
    lm_words = np.zeros((size, size), np.uint64)
    lm_gain = np.zeros((size, size, 2))

    for slot in slots:
        for frame in range(beams.frames[slot], beams.loaded[slot]):
            units = beams.top_units[slot, frame]
            log_probs = beams.top_log_probs[slot, frame]
            if units[0] == blank and (size == 1 or units[1] < 0):
                _take_blank(beams, slot, np.float64(log_probs[0]))
                beams.skipped[slot] += 1
                beams.skipped_mass[slot] -= math.expm1(np.float64(log_probs[0]))
                beams.has_text[slot, frame] = beams.links[slot, 0, NODE] != 0
                continue
            count = beams.counts[slot]
            old_scores = beams.scores[slot]
            old_links = beams.links[slot]
            tokens = 0
            blank_rank = -1
            while tokens < size and units[tokens] >= 0:
                if units[tokens] == blank:
                    blank_rank = tokens
                tokens += 1

            groups = 0
            reach = -math.inf
            for i in range(count):
                any_end[i] = _log_add(old_scores[i, BLANK_END], old_scores[i, TOKEN_END])
                if old_scores[i, BEST_BLANK] > old_scores[i, BEST_TOKEN]:
                    best_end[i] = old_scores[i, BEST_BLANK]
                    marks[i] = old_links[i, MARK_BLANK]
                else:
                    best_end[i] = old_scores[i, BEST_TOKEN]
                    marks[i] = old_links[i, MARK_TOKEN]
                last[i] = beams.units[slot, old_links[i, NODE]]
                bonus[i] = old_scores[i, HOTWORDS] + old_scores[i, LM]
                # The most that a token can bring beside its own log-probability and what its hotword brings: one unit ends two words at
                # most and begins a third, each with a log-probability of at most 0.
                before[i] = bonus[i]
                if lm.enabled:
                    bonus[i] += _pending_word(lm, beams.words[slot, i], int(old_links[i, LM_ENTRY]))
                    before[i] += 3.0 * max(0.0, lm.word_bonus)
                    lm_alike[i] = i
                    for j in range(i):
                        if beams.words[slot, j] == beams.words[slot, i] and old_links[j, LM_NODE] == old_links[i, LM_NODE]:
                            lm_alike[i] = j
                            break
                    lm_known[i, :tokens] = False
                state = int(old_links[i, HOTWORD_STATE])
                group = 0
                while group < groups and group_states[group] != state:
                    group += 1
                if group == groups:
                    groups += 1
                    record = hotwords.states[state]
                    group_states[group] = state
                    group_masks[group] = record.mask
                    group_rows[group] = record.row
                    group_best[group] = record.best
                    group_partial[group] = record.partial
                    group_ends[group] = -math.inf
                    group_first[group] = -1
                bonus[i] += group_partial[group]
                group_ends[group] = max(group_ends[group], any_end[i] + before[i])
                next_member[i] = group_first[group]
                group_first[group] = i
            for group in range(groups):
                group_best[group] += group_ends[group]
                reach = max(reach, group_best[group])

            # Prefixes that stay, or that another hypothesis grows into.
            kept = 0
            merged[:count, :tokens] = False
            for j in range(count):
                own_rank = -1
                for rank in range(tokens):
                    if units[rank] == last[j]:
                        own_rank = rank
                order = int(2 * size * size)
                new = scores[j]
                link = links[j]
                new[BLANK_END] = -math.inf
                new[TOKEN_END] = -math.inf
                new[BEST_BLANK] = -math.inf
                new[BEST_TOKEN] = -math.inf
                link[:_LINKS] = old_links[j]
                link[MARK_BLANK] = -1
                link[MARK_TOKEN] = -1
                link[UNIT] = -1
                link[MARK] = _NO_MARK
                if blank_rank >= 0:
                    order = int(2 * (blank_rank * size + j))
                    new[BLANK_END] = any_end[j] + log_probs[blank_rank]
                    new[BEST_BLANK] = best_end[j] + log_probs[blank_rank]
                    link[MARK_BLANK] = marks[j]
                if own_rank >= 0:
                    log_prob = np.float64(log_probs[own_rank])
                    parent = -1
                    for i in range(count):
                        if old_links[i, NODE] == beams.parents[slot, old_links[j, NODE]]:
                            parent = i
                    # Of the two ways to end in the last token, that of the better ranked hypothesis is looked at first.
                    marked = False
                    for turn in range(2):
                        stays = (turn == 0) == (parent < 0 or j < parent)
                        if stays:
                            order = min(order, int(2 * (own_rank * size + j)))
                            new[TOKEN_END] = _log_add(new[TOKEN_END], old_scores[j, TOKEN_END] + log_prob)
                            best = old_scores[j, BEST_TOKEN] + log_prob
                            if new[BEST_TOKEN] < best:
                                new[BEST_TOKEN] = best
                                # WeNet moves a token's time only where the frame is surer of it than the one that gave the time.
                                if not marked:
                                    marked = True
                                    old_mark = old_links[j, MARK_TOKEN]
                                    link[MARK] = -1 if old_mark < 0 else beams.mark_before[slot, old_mark]
                                    new[PEAK] = log_prob if old_mark < 0 else max(np.float64(beams.mark_peak[slot, old_mark]), log_prob)
                        elif parent >= 0:
                            merged[parent, own_rank] = True
                            order = min(order, int(2 * (own_rank * size + parent) + 1))
                            # The same token twice needs a blank in between.
                            twice = last[parent] == last[j]
                            end = old_scores[parent, BLANK_END] if twice else any_end[parent]
                            best = (old_scores[parent, BEST_BLANK] if twice else best_end[parent]) + log_prob
                            new[TOKEN_END] = _log_add(new[TOKEN_END], end + log_prob)
                            if new[BEST_TOKEN] < best:
                                new[BEST_TOKEN] = best
                                marked = True
                                link[MARK] = old_links[parent, MARK_BLANK] if twice else marks[parent]
                                new[PEAK] = log_prob
                new[HOTWORDS] = old_scores[j, HOTWORDS]
                new[LM] = old_scores[j, LM]
                words[j] = beams.words[slot, j]
                total = _log_add(new[BLANK_END], new[TOKEN_END]) + bonus[j]
                if total > -math.inf:
                    kept = _place(total, order, j, totals, orders, chosen, kept)

            # Prefixes that are new, from the frame's best token to its worst, until none can come in any more.
            used = count
            for rank in range(tokens):
                if rank == blank_rank:
                    continue
                log_prob = np.float64(log_probs[rank])
                # What does not come to this without its own log-probability cannot come in.
                least = totals[size - 1] - _SLACK - log_prob if kept == size else -math.inf
                if reach < least:
                    break
                unit = int(units[rank])
                root_gain = hotwords.root_gains[unit]
                for group in range(groups):
                    if group_best[group] < least:
                        continue
                    led = group_masks[group]
                    if group_rows[group] >= 0:
                        led |= hotwords.bits[group_rows[group], unit >> 6]
                    if led >> np.uint64(unit & 63) & np.uint64(1):
                        state = _next_hotword(hotwords, group_states[group], unit)
                        gain = hotwords.gains[state]
                    else:
                        state = -1  # as from the root; looked up only where it matters
                        gain = root_gain
                    if group_ends[group] + gain < least:
                        continue
                    i = group_first[group]
                    while i >= 0:
                        member = i
                        i = next_member[i]
                        twice = unit == last[member]
                        end = (old_scores[member, BLANK_END] if twice else any_end[member]) + log_prob
                        if end == -math.inf or merged[member, rank]:
                            continue
                        if kept == size and end + before[member] + gain < totals[size - 1] - _SLACK:
                            continue
                        spoken = old_scores[member, LM]
                        total = end + (old_scores[member, HOTWORDS] + gain)
                        lm_node = 0
                        entry = -1
                        word = np.uint64(0)
                        if lm.enabled:
                            alike = lm_alike[member]
                            if not lm_known[alike, rank]:
                                lm_known[alike, rank] = True
                                more, lm_node, word, entry = _spell(
                                    lm,
                                    int(old_links[member, LM_NODE]),
                                    beams.words[slot, member],
                                    int(old_links[member, LM_ENTRY]),
                                    unit,
                                )
                                lm_next[alike, rank, 0] = lm_node
                                lm_next[alike, rank, 1] = entry
                                lm_words[alike, rank] = word
                                lm_gain[alike, rank, 0] = more
                                lm_gain[alike, rank, 1] = _pending_word(lm, word, entry)
                            lm_node = lm_next[alike, rank, 0]
                            entry = lm_next[alike, rank, 1]
                            word = lm_words[alike, rank]
                            spoken += lm_gain[alike, rank, 0]
                            total += spoken + lm_gain[alike, rank, 1]
                        order = int(2 * (rank * size + member) + 1)
                        if kept == size and total < totals[size - 1]:
                            continue
                        if state < 0:
                            state = int(hotwords.roots[unit])
                        new = scores[used]
                        link = links[used]
                        new[BLANK_END] = -math.inf
                        new[TOKEN_END] = end
                        new[BEST_BLANK] = -math.inf
                        new[BEST_TOKEN] = (old_scores[member, BEST_BLANK] if twice else best_end[member]) + log_prob
                        new[HOTWORDS] = old_scores[member, HOTWORDS] + hotwords.states[state].output
                        new[LM] = spoken
                        new[PEAK] = log_prob
                        link[NODE] = old_links[member, NODE]
                        link[MARK_BLANK] = -1
                        link[MARK_TOKEN] = -1
                        link[HOTWORD_STATE] = state
                        link[LM_NODE] = lm_node
                        link[LM_ENTRY] = entry
                        link[UNIT] = unit
                        link[MARK] = old_links[member, MARK_BLANK] if twice else marks[member]
                        words[used] = word
                        kept = _place(total, order, used, totals, orders, chosen, kept)
                        used += 1
                        if kept == size:
                            least = totals[size - 1] - _SLACK - log_prob

            for place in range(kept):
                row = chosen[place]
                link = links[row]
                if link[UNIT] >= 0:
                    link[NODE] = _child(beams, slot, int(link[NODE]), int(link[UNIT]))
                if link[MARK] != _NO_MARK:
                    mark = beams.marks[slot]
                    beams.marks[slot] += 1
                    beams.mark_before[slot, mark] = link[MARK]
                    beams.mark_frame[slot, mark] = frame
                    beams.mark_peak[slot, mark] = scores[row, PEAK]
                    link[MARK_TOKEN] = mark
                beams.scores[slot, place] = scores[row, :_SCORES]
                beams.links[slot, place] = link[:_LINKS]
                beams.words[slot, place] = words[row]
            beams.counts[slot] = kept
            beams.has_text[slot, frame] = beams.links[slot, 0, NODE] != 0
        beams.frames[slot] = beams.loaded[slot]


@_compiled
def unwind(
    beams: Beams, slots: NDArray[np.int64], tokens: NDArray[np.int32], lengths: NDArray[np.int32], common: NDArray[np.int32]
) -> None:
    """Write each slot's best prefix into ``tokens`` (n, L), its length, and how much of it all hypotheses share."""
    for row in range(len(slots)):
        slot = slots[row]
        node = beams.links[slot, 0, NODE]
        shared = node
        for hypothesis in range(1, beams.counts[slot]):
            other = beams.links[slot, hypothesis, NODE]
            while other != shared:
                if beams.depths[slot, other] > beams.depths[slot, shared]:
                    other = beams.parents[slot, other]
                else:
                    shared = beams.parents[slot, shared]
        common[row] = beams.depths[slot, shared]
        lengths[row] = beams.depths[slot, node]
        for index in range(lengths[row] - 1, -1, -1):
            tokens[row, index] = beams.units[slot, node]
            node = beams.parents[slot, node]


@_compiled
def finish(
    beams: Beams,
    slots: NDArray[np.int64],
    hotwords: HotwordTables,
    lm: LmTables,
    scores: NDArray[np.float64],
    lengths: NDArray[np.int32],
    tokens: NDArray[np.int32],
    frames: NDArray[np.int32],
    peaks: NDArray[np.float32],
) -> None:
    """Write the hypotheses of slots as if the audio ended here, best first; the slots stay as they are.

    What an unfinished hotword has earned is taken back; the word in progress is ended, and the sentence.

    Args:
        beams: the slots' state.
        slots: (n,) which slots.
        hotwords: of all these slots.
        lm: the language model.
        scores: (n, H, 3) receives the scores of CTC, hotwords and language model.
        lengths: (n, H) receives the number of tokens of each; -1 where there are no more hypotheses.
        tokens: (n, H, L) receives the tokens.
        frames: (n, H, L) receives their times.
        peaks: (n, H, L) receives their highest log-probabilities.
    """
    size = beams.scores.shape[1]
    totals = np.empty(size)
    orders = np.empty(size, np.int64)
    chosen = np.empty(size, np.int64)
    spoken = np.empty(size)
    for row in range(len(slots)):
        slot = slots[row]
        kept = 0
        for i in range(beams.counts[slot]):
            old = beams.scores[slot, i]
            link = beams.links[slot, i]
            spoken[i] = old[LM]
            if lm.enabled:
                spoken[i] += _end_sentence(lm, int(link[LM_NODE]), beams.words[slot, i], int(link[LM_ENTRY]))
            total = _log_add(old[BLANK_END], old[TOKEN_END]) + old[HOTWORDS] + spoken[i]
            kept = _place(total, int(i), int(i), totals, orders, chosen, kept)
        lengths[row] = -1
        for place in range(kept):
            i = chosen[place]
            old = beams.scores[slot, i]
            link = beams.links[slot, i]
            scores[row, place, 0] = _log_add(old[BLANK_END], old[TOKEN_END])
            scores[row, place, 1] = old[HOTWORDS]
            scores[row, place, 2] = spoken[i]
            mark = link[MARK_BLANK] if old[BEST_BLANK] > old[BEST_TOKEN] else link[MARK_TOKEN]
            node = link[NODE]
            lengths[row, place] = beams.depths[slot, node]
            for index in range(lengths[row, place] - 1, -1, -1):
                tokens[row, place, index] = beams.units[slot, node]
                frames[row, place, index] = beams.mark_frame[slot, mark]
                peaks[row, place, index] = beams.mark_peak[slot, mark]
                node = beams.parents[slot, node]
                mark = beams.mark_before[slot, mark]


@_compiled
def greedy(
    slots: NDArray[np.int64],
    log_probs: NDArray[np.float32],
    frame_counts: NDArray[np.int64],
    blank: int,
    taken: NDArray[np.int32],
    last: NDArray[np.int32],
    lengths: NDArray[np.int32],
    tokens: NDArray[np.int32],
    frames: NDArray[np.int32],
    peaks: NDArray[np.float32],
) -> None:
    """Take frames (n, T, V) by their best token alone; the arrays after ``blank`` are the state, a row for each slot."""
    for row in range(len(slots)):
        slot = slots[row]
        for index in range(frame_counts[row]):
            unit = 0
            for other in range(1, log_probs.shape[2]):
                if log_probs[row, index, other] > log_probs[row, index, unit]:
                    unit = other
            value = log_probs[row, index, unit]
            at = lengths[slot]
            if unit != blank and unit != last[slot]:
                tokens[slot, at] = unit
                frames[slot, at] = taken[slot]
                peaks[slot, at] = value
                lengths[slot] += 1
            elif unit != blank:
                peaks[slot, at - 1] = max(peaks[slot, at - 1], value)
            last[slot] = unit
            taken[slot] += 1
