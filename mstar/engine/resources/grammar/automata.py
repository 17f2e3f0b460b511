"""Position automata of regular expressions over classes of characters; sets are bits of Python integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_

from mstar.engine.resources.grammar.gbnf import Chars, Node, Ref, Repeat, Seq, children

MAX_POSITIONS = 600
MAX_WORK = 200_000  # positions and letters looked at in one walk: some 100 ms


class Alphabet:
    """Characters that no rule tells apart are one letter, numbered from 0."""

    def __init__(self, nodes: list[Node]) -> None:
        starts = {0}
        pending = list(nodes)
        while pending:
            node = pending.pop()
            pending.extend(children(node))
            if isinstance(node, Chars):
                starts.update(point for low, high in node.ranges for point in (low, high + 1))
        self._letter = {start: i for i, start in enumerate(sorted(starts))}
        self._letter.setdefault(0x110000, len(self._letter))

    def letters(self, chars: Chars) -> int:
        """The letters of a class, as bits."""
        return reduce(or_, ((1 << self._letter[high + 1]) - (1 << self._letter[low]) for low, high in chars.ranges), 0)


@dataclass(frozen=True, eq=False)
class Automaton:
    """One position per character class: ``letters[p]`` is what it reads, ``follow[p]`` which may come next.

    ``first`` and ``last`` are the positions at which a word begins and ends; the empty word is a matter of
    ``is_nullable`` alone.  Every position lies on some word.
    """

    is_nullable: bool
    first: int
    last: int
    follow: tuple[int, ...]
    letters: tuple[int, ...]

    @property
    def first_letters(self) -> int:
        return reduce(or_, (self.letters[p] for p in positions(self.first)), 0)


EMPTY = Automaton(True, 0, 0, (), ())


def positions(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, ascending."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def automaton_of(node: Node, rules: Mapping[str, Automaton | None], alphabet: Alphabet) -> Automaton | None:
    """The automaton of a regular node, ``rules`` being those of the rules it uses; None beyond
    :data:`MAX_POSITIONS`."""
    if isinstance(node, Chars):
        return Automaton(False, 1, 1, (0,), (alphabet.letters(node),))
    if isinstance(node, Ref):
        return rules[node.name]
    if isinstance(node, Repeat):
        return _repeated(automaton_of(node.item, rules, alphabet), node.least, node.most)
    found: Automaton | None = None
    for child in children(node):
        part = automaton_of(child, rules, alphabet)
        if part is None or (found is not None and len(found.letters) + len(part.letters) > MAX_POSITIONS):
            return None
        if found is None:
            found = part
        else:
            found = _joined(found, part) if isinstance(node, Seq) else _either(found, part)
    return EMPTY if found is None else found


def _shifted(part: Automaton, by: int) -> tuple[int, int, tuple[int, ...]]:
    return part.first << by, part.last << by, tuple(bits << by for bits in part.follow)


def _joined(left: Automaton, right: Automaton) -> Automaton:
    first, last, follow = _shifted(right, len(left.letters))
    linked = tuple(bits | first if left.last >> p & 1 else bits for p, bits in enumerate(left.follow))
    return Automaton(
        left.is_nullable and right.is_nullable,
        left.first | first if left.is_nullable else left.first,
        left.last | last if right.is_nullable else last,
        linked + follow,
        left.letters + right.letters,
    )


def _either(left: Automaton, right: Automaton) -> Automaton:
    first, last, follow = _shifted(right, len(left.letters))
    return Automaton(
        left.is_nullable or right.is_nullable,
        left.first | first,
        left.last | last,
        left.follow + follow,
        left.letters + right.letters,
    )


def _repeated(item: Automaton | None, least: int, most: int | None) -> Automaton | None:
    if item is None or len(item.letters) * max(least, most or 0, 1) > MAX_POSITIONS:
        return None
    found = EMPTY
    if most is None:
        loop = tuple(bits | item.first if item.last >> p & 1 else bits for p, bits in enumerate(item.follow))
        item = Automaton(item.is_nullable, item.first, item.last, loop, item.letters)
        most = max(least, 1)
    for i in range(most):
        is_nullable = item.is_nullable or i >= least
        found = _joined(found, Automaton(is_nullable, item.first, item.last, item.follow, item.letters))
    return found


def steps(automaton: Automaton) -> Iterator[tuple[int, int]]:
    """Sets of positions that some text leads to, each with the positions that may come next.

    Raises:
        OverflowError: they take more than :data:`MAX_WORK` to find.
    """
    seen, pending, work = set(), [automaton.first], 0
    is_start = True
    while pending:
        state = pending.pop()
        following = state if is_start else reduce(or_, (automaton.follow[p] for p in positions(state)), 0)
        if not is_start:
            yield state, following
        is_start = False
        by_letter: dict[int, int] = {}
        for p in positions(following):
            work += 1 + automaton.letters[p].bit_count()
            if work > MAX_WORK:
                raise OverflowError
            for letter in positions(automaton.letters[p]):
                by_letter[letter] = by_letter.get(letter, 0) | 1 << p
        for reached in by_letter.values():
            if reached not in seen:
                seen.add(reached)
                pending.append(reached)


def is_prefix_free(automaton: Automaton | None) -> bool:
    """Whether no word begins with another word, the empty one included."""
    if automaton is None or automaton.is_nullable:
        return False
    try:
        return not any(state & automaton.last and following for state, following in steps(automaton))
    except OverflowError:
        return False
