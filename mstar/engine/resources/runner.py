"""Builds resources and drives them through a step, in dependency order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, ResourceStep, StepContext, SubmoduleStep


def dependency_order(specs: Sequence[NodeResourceSpec]) -> list[NodeResourceSpec]:
    """Specs so that each follows what it depends on; ties in the order of their keys.

    Raises:
        ValueError: a key that occurs twice, a dependency that no spec declares, or a cycle.
    """
    waiting: dict[str, NodeResourceSpec] = {}
    for spec in sorted(specs, key=lambda s: s.resource_key):
        if spec.resource_key in waiting:
            raise ValueError(f"resource {spec.resource_key!r} is declared twice")
        waiting[spec.resource_key] = spec
    for spec in waiting.values():
        for key in spec.depends_on():
            if key not in waiting:
                raise ValueError(f"resource {spec.resource_key!r} depends on {key!r}, which is not declared")
    ordered: list[NodeResourceSpec] = []
    while waiting:
        ready = next((s for s in waiting.values() if not any(key in waiting for key in s.depends_on())), None)
        if ready is None:
            raise ValueError(f"resources depend on each other in a cycle: {', '.join(waiting)}")
        ordered.append(waiting.pop(ready.resource_key))
    return ordered


def build_resources(specs: Sequence[NodeResourceSpec], info: EngineResourceInfo) -> dict[str, Resource]:
    """Builds every declared resource; each is handed the ones its spec depends on.  Raises as
    :func:`dependency_order` does."""
    built: dict[str, Resource] = {}
    for spec in dependency_order(specs):
        dependencies = {key: built[key] for key in spec.depends_on()}
        own_info = dataclasses.replace(info, dependencies=dependencies)
        built[spec.resource_key] = spec.resource_class.build(spec, own_info)
    return built


class StepRunner:
    """admit, plan and commit over the resources that a step names, in dependency order.

    A step may be planned ahead: :meth:`pre_admit` and :meth:`pre_plan` drive the resources that support it; then
    either :meth:`admit` and :meth:`plan` with ``promoted`` complete that very step, or :meth:`clear` undoes it.
    """

    def __init__(self, resources: Mapping[str, Resource], specs: Sequence[NodeResourceSpec]) -> None:
        """Raises ValueError when a resource plans ahead and one that it depends on does not."""
        ordered = dependency_order(specs)
        for spec in ordered:
            inline = [key for key in spec.depends_on() if not resources[key].supports_preplan]
            if resources[spec.resource_key].supports_preplan and inline:
                raise ValueError(
                    f"resource {spec.resource_key!r} plans ahead, {inline[0]!r} that it depends on does not"
                )
        self._resources = [(spec.resource_key, resources[spec.resource_key]) for spec in ordered]
        self._ahead = [(key, resource) for key, resource in self._resources if resource.supports_preplan]
        self._inline = [(key, resource) for key, resource in self._resources if not resource.supports_preplan]
        self._keys = frozenset(key for key, _ in self._resources)

    def admit(self, step: SubmoduleStep, ctx: StepContext, promoted: bool = False) -> tuple[AdmitOutcome, str | None]:
        """Asks each resource; stops at the first that refuses or is not ready, and names it.  With ``promoted``, those
        that admitted the step ahead are not asked again.  Those that had admitted a step which is refused, or whose
        admission raises, abandon it.

        Raises:
            KeyError: the step names a resource that does not exist.
        """
        self._check_keys(step)
        admitted: list[tuple[Resource, ResourceStep]] = []
        try:
            for key, resource in self._inline if promoted else self._resources:
                part = step.get(key)
                if part is not None:
                    outcome = resource.admit(part, ctx)
                    if not (outcome.ok and outcome.ready):
                        return outcome, key
                    admitted.append((resource, part))
            admitted.clear()
            return ADMITTED, None
        finally:
            for resource, part in reversed(admitted):
                resource.abandon(part, ctx)

    def plan(self, step: SubmoduleStep, ctx: StepContext, promoted: bool = False) -> None:
        """Fills ``ctx.plan_results`` anew; ``promoted``: by completing staged plans.  KeyError as :meth:`admit`."""
        self._check_keys(step)
        results = ctx.plan_results
        results.clear()
        for key, resource in self._resources:
            part = step.get(key)
            if part is not None:
                ahead = promoted and resource.supports_preplan
                results[key] = resource.promote_preplan(part, ctx) if ahead else resource.plan(part, ctx)

    def pre_admit(self, step: SubmoduleStep, ctx: StepContext) -> tuple[AdmitOutcome, str | None]:
        """:meth:`admit` by the resources that plan ahead; ``ctx.is_preplan``.  :meth:`clear` undoes it."""
        assert ctx.is_preplan
        self._check_keys(step)
        for key, resource in self._ahead:
            part = step.get(key)
            if part is not None:
                outcome = resource.admit(part, ctx)
                if not (outcome.ok and outcome.ready):
                    return outcome, key
        return ADMITTED, None

    def pre_plan(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """:meth:`plan` by the resources that plan ahead; ``ctx.is_preplan``."""
        assert ctx.is_preplan
        ctx.plan_results.clear()
        for key, resource in self._ahead:
            part = step.get(key)
            if part is not None:
                ctx.plan_results[key] = resource.plan(part, ctx)

    def clear(self) -> None:
        """Undoes what was planned ahead; dependents first, as they may have built on the others' plans."""
        for _, resource in reversed(self._ahead):
            resource.clear_preplan()

    def commit(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Makes the step's effects durable, once its forward was submitted.  KeyError as :meth:`admit`."""
        self._check_keys(step)
        for key, resource in self._resources:
            part = step.get(key)
            if part is not None:
                resource.commit(part, ctx)

    def abandon(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Instead of :meth:`commit`, when the plan or the forward failed; dependents first."""
        for key, resource in reversed(self._resources):
            part = step.get(key)
            if part is not None:
                resource.abandon(part, ctx)

    def _check_keys(self, step: SubmoduleStep) -> None:
        if not self._keys.issuperset(step.steps):
            unknown = sorted(set(step.steps) - self._keys)
            raise KeyError(f"the step names unknown resources: {', '.join(unknown)}")
