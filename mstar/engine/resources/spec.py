"""Declarations of resources: pure data, no kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar.engine.resources.base import Resource


@dataclass(frozen=True)
class NodeResourceSpec:
    """A resource that the named nodes share.  ``nodes`` is coerced to a set."""

    resource_key: str
    nodes: set[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", set(self.nodes))

    def depends_on(self) -> tuple[str, ...]:
        """Keys of the resources whose plans this one reads."""
        return ()

    @property
    def resource_class(self) -> type[Resource]:
        """The builder, imported inside the property so that a declaration stays free of kernels."""
        raise TypeError(f"{type(self).__name__} names no resource_class")

    def max_requests(self) -> int | None:
        """Most requests this resource has room for at one time, whatever they need; None is no bound."""
        return None

    def apply_yaml_overrides(self, **overrides: Any) -> NodeResourceSpec:
        """A spec with the named settings replaced.

        Raises:
            TypeError: this kind of resource takes no overrides.
        """
        raise TypeError(f"resource {self.resource_key!r} takes no overrides, got {sorted(overrides)}")


class ResourceReqConfig:
    """Per-request parameters of one resource."""

    def apply_conductor_config(self, **kwargs: Any) -> None:
        """Takes what the conductor knows (such as ``seed``); unknown keywords are ignored."""
