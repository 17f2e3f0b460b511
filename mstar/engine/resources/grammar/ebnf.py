"""Rules in EBNF as a grammar for llguidance, of exactly their language.

llguidance splits a text into lexemes, each as long as it can be, before it parses.  Rules know no lexemes: ``[a-z]*
"z"`` matches ``az``, while a lexeme for ``[a-z]*`` would take the ``z`` too.  So rules without recursion become one
lexeme altogether, and in recursive ones (see :mod:`.lexemes`) only what can be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from mstar.engine.resources.grammar.gbnf import Alt, Chars, Node, Ref, Repeat, children, parse, refs_of
from mstar.engine.resources.grammar.lexemes import split


def lark_of(text: str) -> str:
    """The grammar of the rules in ``text``, in llguidance's Lark syntax.

    Raises:
        ValueError: malformed, or a rule that ``root`` uses never comes to an end.
    """
    rules = _used(parse(text))
    endless = _endless(rules)
    if endless:
        raise ValueError(f"rule {endless[0]} never comes to an end")
    regular = _regular(rules)
    terminals = {name: f"T{i}" for i, name in enumerate(rules) if name in regular}
    lines = [f"{terminals[name]}: {_expression(rules[name], terminals)}" for name in terminals]
    if "root" in regular:
        return "\n".join([f"start: {terminals['root']}", *lines])
    lexemes, structures = split(rules, regular)
    names: dict[Node, str] = {}
    for lexeme in lexemes:
        if isinstance(lexeme, Ref):
            names[lexeme] = terminals[lexeme.name]
        else:
            names[lexeme] = f"L{len(names)}"
            lines.append(f"{names[lexeme]}: {_expression(lexeme, terminals)}")
    nonterminals = {name: f"r{i}" for i, name in enumerate(structures)}
    starts = [f"start: {nonterminals['root']}"]
    starts += [f"{nonterminals[name]}: {_expression(node, nonterminals, names)}" for name, node in structures.items()]
    return "\n".join([*starts, *lines])


def _used(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules that ``root`` uses, in their order."""
    used, pending = {"root"}, ["root"]
    while pending:
        new = refs_of(rules[pending.pop()]) - used
        used |= new
        pending.extend(new)
    return {name: node for name, node in rules.items() if name in used}


def _endless(rules: Mapping[str, Node]) -> list[str]:
    """Rules that no finite text follows."""
    ending: set[str] = set()

    def ends(node: Node) -> bool:
        if isinstance(node, Ref):
            return node.name in ending
        if isinstance(node, Repeat):
            return node.least == 0 or ends(node.item)
        return any(map(ends, node.options)) if isinstance(node, Alt) else all(map(ends, children(node)))

    while new := {name for name, node in rules.items() if name not in ending and ends(node)}:
        ending |= new
    return [name for name in rules if name not in ending]


def _regular(rules: Mapping[str, Node]) -> dict[str, None]:
    """Rules that neither are nor use recursive ones, each behind those it uses."""
    uses = {name: refs_of(node) for name, node in rules.items()}
    found: dict[str, None] = {}
    while new := [name for name, used in uses.items() if name not in found and used <= found.keys()]:
        found.update(dict.fromkeys(new))
    return found


def _expression(node: Node, rules: Mapping[str, str], lexemes: Mapping[Node, str] | None = None) -> str:
    """A node in Lark's syntax, by the names that its rules and, in a rule of the parser, its lexemes have there."""
    if lexemes is not None and node in lexemes:
        return lexemes[node]
    if isinstance(node, Chars):
        return f"/[{''.join(_range(low, high) for low, high in node.ranges)}]/"
    if isinstance(node, Ref):
        return rules[node.name]
    if isinstance(node, Repeat):
        most = "" if node.most is None else node.most
        return f"({_expression(node.item, rules, lexemes)}){{{node.least},{most}}}"
    parts = [_expression(child, rules, lexemes) for child in children(node)]
    if isinstance(node, Alt):
        return f"({' | '.join(parts)})"
    return f"({' '.join(parts)})" if parts else '""'


def _range(low: int, high: int) -> str:
    return f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"
