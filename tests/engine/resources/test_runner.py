"""Resources are built and driven in dependency order; a refusal is named and stops the round."""

import contextlib
from dataclasses import dataclass

import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.runner import StepRunner, build_resources, dependency_order
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, AllocationFailed, ResourceStep, SubmoduleStep

from .drive import Rig


@dataclass(frozen=True)
class Spec(NodeResourceSpec):
    needs: tuple[str, ...] = ()
    ahead: bool = False

    def depends_on(self):
        return self.needs

    @property
    def resource_class(self):
        return Recorder


class Recorder(Resource):
    def __init__(self, spec, info):
        self.key, self.info, self.calls, self.outcome = spec.resource_key, info, [], ADMITTED
        self.supports_preplan = spec.ahead
        self.log = None  # calls of all resources, in order

    @classmethod
    def build(cls, spec, info):
        return cls(spec, info)

    def admit(self, step, ctx):
        self.calls.append("admit")
        return self.outcome

    def plan(self, step, ctx):
        self.calls.append(("plan", tuple(ctx.plan_results)))
        return f"plan of {self.key}"

    def commit(self, step, ctx):
        self.calls.append("commit")

    def promote_preplan(self, step, ctx):
        self.calls.append(("promote", tuple(ctx.plan_results)))
        return f"staged plan of {self.key}"

    def clear_preplan(self):
        self.calls.append("clear")
        if self.log is not None:
            self.log.append(self.key)

    def abandon(self, step, ctx):
        self.calls.append("abandon")
        if self.log is not None:
            self.log.append(self.key)


def spec(key, *needs, ahead=False):
    return Spec(key, {"LLM"}, needs, ahead)


def recorders(*specs):
    info = EngineResourceInfo(torch.device("cpu"), torch.float32, torch.float32, capacity=1, padding_rows=0)
    resources = build_resources(specs, info)
    return resources, StepRunner(resources, specs)


def whole_step(*keys):
    return SubmoduleStep({key: ResourceStep() for key in keys})


def test_order_is_topological_with_alphabetical_ties():
    ordered = dependency_order([spec("z"), spec("b", "z"), spec("a", "b"), spec("c"), spec("d", "c")])
    assert [s.resource_key for s in ordered] == ["c", "d", "z", "b", "a"]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec("a"), spec("a")], "'a' is declared twice"),
        ([spec("a", "b")], "'a' depends on 'b', which is not declared"),
        ([spec("a", "b"), spec("b", "a"), spec("c")], "cycle: a, b"),
        ([spec("a", "a")], "cycle: a"),
    ],
)
def test_impossible_declarations_are_refused(specs, message):
    with pytest.raises(ValueError, match=message):
        dependency_order(specs)


def test_a_resource_is_handed_only_what_its_spec_listed():
    resources, _ = recorders(spec("a"), spec("b", "a"), spec("c"))
    assert resources["b"].info.dependency("a") is resources["a"]
    with pytest.raises(KeyError):
        resources["b"].info.dependency("c")


def test_plans_see_the_results_of_what_was_planned_before_and_nothing_of_the_last_step():
    resources, runner = recorders(spec("a", "b"), spec("b"))
    ctx = Rig().context([], [])
    ctx.plan_results["old"] = 1
    runner.plan(whole_step("a", "b"), ctx)
    assert resources["b"].calls == [("plan", ())]
    assert resources["a"].calls == [("plan", ("b",))]
    assert ctx.plan_results == {"b": "plan of b", "a": "plan of a"}


def test_resources_that_a_step_does_not_name_are_left_alone():
    resources, runner = recorders(spec("a"), spec("b"))
    ctx = Rig().context([], [])
    assert runner.admit(whole_step("b"), ctx) == (ADMITTED, None)
    runner.plan(whole_step("b"), ctx)
    runner.commit(whole_step("b"), ctx)
    assert resources["a"].calls == []
    assert resources["b"].calls == ["admit", ("plan", ()), "commit"]


def test_every_step_is_driven_by_its_own_parts_however_many_there_were():
    resources, runner = recorders(spec("a"), spec("b"))
    ctx, kept = Rig().context([], []), whole_step("a", "b")
    for n in range(100):
        for resource in resources.values():
            resource.calls.clear()
        step = kept if n % 3 == 0 else whole_step(*"ab"[: 1 + n % 2])  # whose id may be that of one that is gone
        runner.admit(step, ctx)
        runner.commit(step, ctx)
        assert {key for key, resource in resources.items() if resource.calls == ["admit", "commit"]} == set(step.keys())


class Idle(Resource):
    """Has none of the hooks."""

    @classmethod
    def build(cls, spec, info):
        return cls()


def test_a_resource_without_hooks_is_planned_as_any_other():
    info = EngineResourceInfo(torch.device("cpu"), torch.float32, torch.float32, capacity=1, padding_rows=0)
    specs = [spec("a"), spec("b", "a")]
    resources = {**build_resources(specs, info), "a": Idle()}
    runner, ctx, step = StepRunner(resources, specs), Rig().context([], []), whole_step("a", "b")
    assert runner.admit(step, ctx) == (ADMITTED, None)
    runner.plan(step, ctx)
    runner.commit(step, ctx)
    assert ctx.plan_results == {"a": None, "b": "plan of b"}
    assert resources["b"].calls == ["admit", ("plan", ("a",)), "commit"]


@pytest.mark.parametrize(
    "outcome", [AdmitOutcome(ok=False, reason=AllocationFailed("short")), AdmitOutcome(ready=False)]
)
def test_admit_stops_at_the_first_refusal_and_names_it(outcome):
    resources, runner = recorders(spec("a"), spec("b"), spec("c"))
    resources["b"].outcome = outcome
    assert runner.admit(whole_step("a", "b", "c"), Rig().context([], [])) == (outcome, "b")
    assert resources["c"].calls == []


@pytest.mark.parametrize("raises", [False, True])
def test_those_that_admitted_a_step_that_comes_to_nothing_abandon_it(raises):
    resources, runner = recorders(spec("a"), spec("b"), spec("c"), spec("d"))
    resources["c"].outcome = None if raises else AdmitOutcome(ready=False)  # None has no ``ok``
    with pytest.raises(AttributeError) if raises else contextlib.nullcontext():
        assert runner.admit(whole_step("a", "b", "c", "d"), Rig().context([], []))[1] == "c"
    assert {key: resource.calls for key, resource in resources.items()} == {
        "a": ["admit", "abandon"],
        "b": ["admit", "abandon"],
        "c": ["admit"],
        "d": [],
    }


@pytest.mark.parametrize("hook", ["admit", "plan", "commit"])
def test_an_unknown_key_in_a_step_is_an_error(hook):
    _, runner = recorders(spec("a"))
    with pytest.raises(KeyError, match="nope"):
        getattr(runner, hook)(whole_step("a", "nope"), Rig().context([], []))


def ahead(key, *needs):
    return spec(key, *needs, ahead=True)


def preplan_context():
    ctx = Rig().context([], [])
    ctx.is_preplan = True
    return ctx


def test_a_resource_that_plans_ahead_needs_dependencies_that_do():
    recorders(ahead("a", "b"), ahead("b"), spec("c", "a"))
    with pytest.raises(ValueError, match="'a' plans ahead, 'b' that it depends on does not"):
        recorders(ahead("a", "b"), spec("b"))


def test_only_those_that_plan_ahead_are_driven_ahead_and_only_the_others_inline():
    resources, runner = recorders(ahead("a", "b"), ahead("b"), spec("c"))
    step, early, late = whole_step("a", "b", "c"), preplan_context(), Rig().context([], [])
    assert runner.pre_admit(step, early) == (ADMITTED, None)
    runner.pre_plan(step, early)
    assert early.plan_results == {"b": "plan of b", "a": "plan of a"}
    assert resources["c"].calls == []
    assert runner.admit(step, late, promoted=True) == (ADMITTED, None)
    runner.plan(step, late, promoted=True)
    assert late.plan_results == {"b": "staged plan of b", "a": "staged plan of a", "c": "plan of c"}
    assert resources["a"].calls == ["admit", ("plan", ("b",)), ("promote", ("b",))]
    assert resources["c"].calls == ["admit", ("plan", ("b", "a"))]


def test_a_refusal_ahead_is_named():
    resources, runner = recorders(ahead("a"), ahead("b"))
    resources["a"].outcome = AdmitOutcome(ready=False)
    assert runner.pre_admit(whole_step("a", "b"), preplan_context()) == (AdmitOutcome(ready=False), "a")
    assert resources["b"].calls == []


@pytest.mark.parametrize(("undo", "undone"), [("clear", ["a", "b"]), ("abandon", ["a", "b", "c"])])
def test_undoing_begins_with_those_that_others_were_planned_for(undo, undone):
    resources, runner = recorders(ahead("a", "b"), ahead("b"), spec("c"))
    log = []
    for resource in resources.values():
        resource.log = log
    arguments = (whole_step("a", "b", "c"), Rig().context([], [])) if undo == "abandon" else ()
    getattr(runner, undo)(*arguments)
    assert sorted(log) == undone
    assert log.index("a") < log.index("b")
