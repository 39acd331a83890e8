"""Plans as text: what a run log holds and a rank receives is the plan that was made."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.decide.plan import Plan, plan_from_json
from paceline.policy.barrier import BSP, KSync
from paceline.policy.base import SyncPolicy
from paceline.policy.local import LocalSGD
from paceline.policy.ring import AttachedRing
from paceline.policy.stale import ASP, KAsync


@st.composite
def policies(draw: st.DrawFn) -> SyncPolicy[Any]:
    plain = st.sampled_from([BSP(), KSync(3, "cancel"), KAsync(2), ASP(), LocalSGD(4, KSync(2))])
    if draw(st.booleans()):
        return draw(plain)
    order = draw(st.permutations(range(6)))
    x = draw(st.integers(1, 6))
    parent_of = {child: draw(st.sampled_from(order[:x])) for child in order[x:]}
    return AttachedRing(tuple(order[:x]), parent_of, draw(st.integers(0, 99)))


@given(
    policy=policies(),
    epoch=st.integers(1, 99),
    step=st.integers(1, 10**6),
    scale=st.floats(0.01, 2),
    gain=st.floats(0.5, 99),
    reason=st.text(),
    sizes=st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=8).map(tuple),
)
def test_a_plan_survives_json(policy, epoch, step, scale, gain, reason, sizes):
    plan = Plan(epoch, step, policy, scale, gain, reason, sizes)
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
