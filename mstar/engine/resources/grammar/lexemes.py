"""What of recursive rules can be lexemes: parts whose longest match is the one that the rules mean.

A lexeme is sound if a character that could lengthen it, or that could make another lexeme of the same text, never is
one that may follow it.  Parts are taken as large as they are written and split until all are sound; single
characters always are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mstar.engine.resources.grammar.automata import (
    Alphabet,
    Automaton,
    automaton_of,
    is_prefix_free,
    positions,
    steps,
)
from mstar.engine.resources.grammar.gbnf import Alt, Node, Ref, Repeat, Seq, children, refs_of

_MOST_ROUNDS = 60
_MOST_POSITIONS = 3000


def split(rules: Mapping[str, Node], regular: Collection[str]) -> tuple[list[Node], dict[str, Node]]:
    """Splits ``rules`` of which ``regular``, each behind those it uses, are not recursive.

    Returns:
        The lexemes, and the rules of the parser: every node in them is a lexeme, made of such, or a reference to a
        rule of the parser.

    Raises:
        ValueError: the rules are too many or too intricate to split in reasonable time.
    """
    splitter = _Splitter(rules, regular)
    for _ in range(_MOST_ROUNDS):
        broken = splitter.unsound()
        if not broken:
            return list(splitter.lexemes), splitter.structures
        splitter.broken |= broken
    raise ValueError("its recursive rules are too intricate")


class _Splitter:
    def __init__(self, rules: Mapping[str, Node], regular: Collection[str]) -> None:
        self._rules = rules
        self._regular = frozenset(regular)
        self._alphabet = Alphabet(list(rules.values()))
        self._rule_automata: dict[str, Automaton | None] = {}
        for name in regular:
            self._rule_automata[name] = automaton_of(rules[name], self._rule_automata, self._alphabet)
        self._automata: dict[Node, Automaton | None] = {}
        self._prefix_free: dict[Node, bool] = {}
        self.broken: set[Node] = set()
        self.lexemes: dict[Node, Automaton] = {}
        self.structures: dict[str, Node] = {}

    def unsound(self) -> set[Node]:
        """Lays out ``structures`` and ``lexemes`` without the ``broken`` ones; returns which of these to break."""
        self._lay_out()
        found = {node: self._automaton(node) for node in self.lexemes}
        too_large = {node for node, automaton in found.items() if automaton is None}
        if too_large:
            return too_large
        self.lexemes = {node: automaton for node, automaton in found.items() if automaton is not None}
        size = sum(len(automaton.letters) for automaton in self.lexemes.values())
        if size > _MOST_POSITIONS:
            raise ValueError(f"its recursive rules match {size} single characters, more than {_MOST_POSITIONS}")
        following = _Following(self.structures, self.lexemes).letters
        union, owners, last = _union(self.lexemes)
        broken = set()
        try:
            for state, next_positions in steps(union):
                ended = state & last
                if not ended:
                    continue
                after = 0
                for p in positions(ended):
                    after |= following[owners[p]]
                broken |= {owners[q] for q in positions(next_positions) if union.letters[q] & after}
        except OverflowError:
            broken = {node for node, automaton in self.lexemes.items() if len(automaton.letters) > 1}
            if not broken:
                raise ValueError("its recursive rules use too many different characters") from None
        return broken

    def _lay_out(self) -> None:
        self.lexemes, self.structures = {}, {}
        pending = ["root"]
        while pending:
            name = pending.pop()
            if name not in self.structures:
                self.structures[name] = node = self._structure(self._rules[name])
                pending.extend(sorted(self._rules_in(node)))

    def _structure(self, node: Node) -> Node:
        if self._is_lexeme(node):
            self.lexemes[node] = None  # type: ignore[assignment]
            return node
        if isinstance(node, Seq):
            return Seq(tuple(self._structure(part) for part in self._parts(node)))
        if isinstance(node, Alt):
            return Alt(tuple(map(self._structure, self._options(node))))
        if isinstance(node, Repeat):
            return Repeat(self._structure(node.item), node.least, node.most)
        return node

    def _is_lexeme(self, node: Node) -> bool:
        return node not in self.broken and node != Seq(()) and refs_of(node) <= self._regular

    def _parts(self, node: Seq) -> list[Node]:
        """The items, those put together that are one lexeme that none begins with."""
        parts: list[Node] = []
        at = 0
        while at < len(node.items):
            end = at + 1
            for stop in range(len(node.items), at + 1, -1):
                joined = Seq(node.items[at:stop])
                if joined != node and self._is_lexeme(joined) and self._is_prefix_free(joined):
                    end = stop
                    break
            parts.append(node.items[at] if end == at + 1 else Seq(node.items[at:end]))
            at = end
        return parts

    def _is_prefix_free(self, node: Node) -> bool:
        if node not in self._prefix_free:
            self._prefix_free[node] = is_prefix_free(self._automaton(node))
        return self._prefix_free[node]

    def _options(self, node: Alt) -> list[Node]:
        """The options, those that can be lexemes put together as one."""
        whole = Alt(tuple(filter(self._is_lexeme, node.options)))
        if len(whole.options) < 2 or whole == node or whole in self.broken:
            return list(node.options)
        return [whole, *(option for option in node.options if option not in whole.options)]

    def _automaton(self, node: Node) -> Automaton | None:
        if node not in self._automata:
            self._automata[node] = automaton_of(node, self._rule_automata, self._alphabet)
        return self._automata[node]

    def _rules_in(self, node: Node) -> set[str]:
        """Rules of the parser that a structure uses."""
        if node in self.lexemes:
            return set()
        return {node.name} if isinstance(node, Ref) else {n for child in children(node) for n in self._rules_in(child)}


def _union(lexemes: Mapping[Node, Automaton]) -> tuple[Automaton, list[Node], int]:
    """All lexemes side by side: their automaton, which lexeme each position belongs to, and where one may end."""
    first = last = 0
    follow: list[int] = []
    letters: list[int] = []
    owners: list[Node] = []
    for node, automaton in lexemes.items():
        by = len(letters)
        first |= automaton.first << by
        last |= automaton.last << by
        follow.extend(bits << by for bits in automaton.follow)
        letters.extend(automaton.letters)
        owners.extend([node] * len(automaton.letters))
    return Automaton(False, first, last, tuple(follow), tuple(letters)), owners, last


class _Following:
    """``letters[lexeme]``: the letters that may come right behind it anywhere in the rules of the parser."""

    def __init__(self, structures: Mapping[str, Node], lexemes: Mapping[Node, Automaton]) -> None:
        self._lexemes = lexemes
        self._nullable: set[str] = set()
        self._first = dict.fromkeys(structures, 0)
        self._behind = dict.fromkeys(structures, 0)
        self.letters: dict[Node, int] = dict.fromkeys(lexemes, 0)
        self._settle(structures)

    def _settle(self, structures: Mapping[str, Node]) -> None:
        is_moving = True
        while is_moving:
            is_moving = False
            for name, node in structures.items():
                if name not in self._nullable and self._is_nullable(node):
                    self._nullable.add(name)
                    is_moving = True
                first = self._first_of(node)
                is_moving |= first != self._first[name]
                self._first[name] = first
        while True:
            before = (dict(self._behind), dict(self.letters))
            for name, node in structures.items():
                self._put_behind(node, self._behind[name])
            if before == (self._behind, self.letters):
                return

    def _is_nullable(self, node: Node) -> bool:
        if node in self._lexemes:
            return self._lexemes[node].is_nullable
        if isinstance(node, Ref):
            return node.name in self._nullable
        if isinstance(node, Repeat):
            return node.least == 0 or self._is_nullable(node.item)
        parts = map(self._is_nullable, children(node))
        return any(parts) if isinstance(node, Alt) else all(parts)

    def _first_of(self, node: Node) -> int:
        if node in self._lexemes:
            return self._lexemes[node].first_letters
        if isinstance(node, Ref):
            return self._first[node.name]
        first = 0
        for child in children(node):
            first |= self._first_of(child)
            if isinstance(node, Seq) and not self._is_nullable(child):
                break
        return first

    def _put_behind(self, node: Node, behind: int) -> None:
        if node in self._lexemes:
            self.letters[node] |= behind
        elif isinstance(node, Ref):
            self._behind[node.name] |= behind
        elif isinstance(node, Repeat):
            self._put_behind(node.item, behind | self._first_of(node.item))
        elif isinstance(node, Alt):
            for option in node.options:
                self._put_behind(option, behind)
        elif isinstance(node, Seq):
            for item in reversed(node.items):
                self._put_behind(item, behind)
                first = self._first_of(item)
                behind = behind | first if self._is_nullable(item) else first
