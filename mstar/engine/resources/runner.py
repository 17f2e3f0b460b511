"""Builds resources and drives them through a step, in dependency order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


_MOST_KEPT_STEPS = 8  # those of unchanged batches take turns: a few walks, each on two slots
_HOOKS = ("admit", "commit", "abandon")  # those that few resources have
_Part = tuple[str, Resource, ResourceStep]


@dataclass(frozen=True, eq=False)
class _Parts:
    """A step's parts with their resources, in dependency order: all of them, and those that have each hook.

    The reference to ``step`` keeps its id from being another's.
    """

    step: SubmoduleStep
    every: tuple[_Part, ...]
    admit: tuple[_Part, ...]
    commit: tuple[_Part, ...]
    abandon: tuple[_Part, ...]


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
        self._ahead = [resource for _, resource in self._resources if resource.supports_preplan]
        self._keys = frozenset(key for key, _ in self._resources)
        self._having = {hook: {key for key, each in self._resources if each.overrides(hook)} for hook in _HOOKS}
        self._kept: dict[int, _Parts] = {}  # by the step's id

    def admit(self, step: SubmoduleStep, ctx: StepContext, promoted: bool = False) -> tuple[AdmitOutcome, str | None]:
        """Asks each resource; stops at the first that refuses or is not ready, and names it.  With ``promoted``, those
        that admitted the step ahead are not asked again.  Those that had admitted a step which is refused, or whose
        admission raises, abandon it.

        Raises:
            KeyError: the step names a resource that does not exist.
        """
        admitted: list[tuple[Resource, ResourceStep]] = []
        try:
            for key, resource, part in self._parts(step).admit:
                if promoted and resource.supports_preplan:
                    continue
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
        results = ctx.plan_results
        results.clear()
        for key, resource, part in self._parts(step).every:
            ahead = promoted and resource.supports_preplan
            results[key] = resource.promote_preplan(part, ctx) if ahead else resource.plan(part, ctx)

    def pre_admit(self, step: SubmoduleStep, ctx: StepContext) -> tuple[AdmitOutcome, str | None]:
        """:meth:`admit` by the resources that plan ahead; ``ctx.is_preplan``.  :meth:`clear` undoes it."""
        assert ctx.is_preplan
        for key, resource, part in self._parts(step).admit:
            if resource.supports_preplan:
                outcome = resource.admit(part, ctx)
                if not (outcome.ok and outcome.ready):
                    return outcome, key
        return ADMITTED, None

    def pre_plan(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """:meth:`plan` by the resources that plan ahead; ``ctx.is_preplan``."""
        assert ctx.is_preplan
        ctx.plan_results.clear()
        for key, resource, part in self._parts(step).every:
            if resource.supports_preplan:
                ctx.plan_results[key] = resource.plan(part, ctx)

    def clear(self) -> None:
        """Undoes what was planned ahead; dependents first, as they may have built on the others' plans."""
        for resource in reversed(self._ahead):
            resource.clear_preplan()

    def repeats(self, step: SubmoduleStep, ctx: StepContext) -> bool:
        """Whether the step, planned on its slot before, can be replayed there without a plan that writes anything."""
        return ctx.slot_lease is not None and all(
            resource.repeats_in_graph(part, ctx) for _, resource, part in self._parts(step).every
        )

    def commit(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Makes the step's effects durable, once its forward was submitted.  KeyError as :meth:`admit`."""
        for _, resource, part in self._parts(step).commit:
            resource.commit(part, ctx)

    def abandon(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Instead of :meth:`commit`, when the plan or the forward failed; dependents first."""
        for _, resource, part in reversed(self._parts(step).abandon):
            resource.abandon(part, ctx)

    def _parts(self, step: SubmoduleStep) -> _Parts:
        """The step's parts, sorted out once for as long as its batch is unchanged."""
        parts = self._kept.get(id(step))
        if parts is None:
            if len(self._kept) >= _MOST_KEPT_STEPS:
                self._kept.clear()
            parts = self._kept[id(step)] = self._sorted(step)
        return parts

    def _sorted(self, step: SubmoduleStep) -> _Parts:
        if not self._keys.issuperset(step.steps):
            unknown = sorted(set(step.steps) - self._keys)
            raise KeyError(f"the step names unknown resources: {', '.join(unknown)}")
        every = tuple((key, resource, step.steps[key]) for key, resource in self._resources if key in step.steps)

        admit, commit, abandon = (tuple([part for part in every if part[0] in self._having[hook]]) for hook in _HOOKS)
        return _Parts(step, every, admit, commit, abandon)
