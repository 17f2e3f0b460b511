"""Declarations of resources: pure data, no kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def apply_overrides(
    specs: Sequence[NodeResourceSpec], overrides: Mapping[str, Mapping[str, Any]]
) -> list[NodeResourceSpec]:
    """Specs with the settings that ``overrides`` gives by resource key.

    Raises:
        ValueError: an unknown key, or a setting that the resource does not have or refuses; names both.
    """
    unknown = sorted(overrides.keys() - {spec.resource_key for spec in specs})
    if unknown:
        known = ", ".join(sorted(spec.resource_key for spec in specs))
        raise ValueError(f"unknown resource {unknown[0]!r}; this model has {known}")
    return [_overridden(spec, overrides.get(spec.resource_key)) for spec in specs]


def _overridden(spec: NodeResourceSpec, settings: Mapping[str, Any] | None) -> NodeResourceSpec:
    if settings is None:
        return spec
    try:
        return spec.apply_yaml_overrides(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"resource {spec.resource_key!r}: {error}") from error


class ResourceReqConfig:
    """Per-request parameters of one resource."""

    @property
    def needs_full_variant(self) -> bool:
        """Whether the request's steps need what a model captures in its ``full`` variant only."""
        return False

    @property
    def needs_preparation(self) -> bool:
        """Whether :meth:`~mstar.engine.resources.base.Resource.prepare_request` has work to do."""
        return False

    def apply_conductor_config(self, **kwargs: Any) -> None:
        """Takes what the conductor knows (such as ``seed``); unknown keywords are ignored."""
