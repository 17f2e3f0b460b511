"""What a model declares about grammars that a request's text must follow: spec, per-request config, step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import ResourceStep

if TYPE_CHECKING:
    from mstar.engine.resources.base import Resource


GUIDE_KINDS = ("json", "json_schema", "regex", "ebnf_grammar", "choice")
MAX_GUIDE_BYTES = 256 << 10


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """``pieces[i]``: the bytes that token ``i`` adds to a text, empty where it adds none.  ``special_ids`` stand for no
    text whatever their bytes; ``eos_ids`` end a text."""

    pieces: Sequence[bytes]
    special_ids: Collection[int]
    eos_ids: Collection[int]


@dataclass(frozen=True)
class GrammarSpec(NodeResourceSpec):
    """Grammars over logits of width ``vocab_size``; ``vocabulary`` is called for the first grammar."""

    vocab_size: int
    vocabulary: Callable[[], Vocabulary]

    @property
    def resource_class(self) -> type[Resource]:
        from mstar.engine.resources.grammar.manager import Grammars

        return Grammars


@dataclass(frozen=True)
class GrammarReqConfig(ResourceReqConfig):
    """``kind``: one of :data:`GUIDE_KINDS`, None without a grammar.  ``stop_ids`` end the text
    too where the grammar lets it end; with ``ignore_eos`` the end-of-sequence ids do not."""

    kind: str | None = None
    text: str = ""
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def needs_full_variant(self) -> bool:
        return self.kind is not None

    @property
    def needs_preparation(self) -> bool:
        return self.kind is not None


@dataclass(frozen=True)
class GrammarStep(ResourceStep):
    """Every row may be under a grammar."""
