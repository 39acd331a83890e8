"""Policies as JSON and as names on the command line; every policy's way through JSON is in the contract suite."""

import json

import pytest

from paceline.policy.barrier import BSP, Deadline, KSync
from paceline.policy.catalog import from_json, parse, to_json
from paceline.policy.group import GroupSync
from paceline.policy.local import DropCompute, LocalSGD
from paceline.policy.ring import AttachedRing, GroupedRing
from paceline.policy.stale import ASP, SSP, KAsync, Zeno


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ('{"name": "BSP"}', BSP()),
        (
            '{"name": "AttachedRing", "ring": [0, 1, 3], "parent_of": {"2": 0}, "max_staleness": 16}',
            AttachedRing((0, 1, 3), {2: 0}, 16),
        ),
        ('{"name": "AttachedRing", "ring": [1, 0], "parent_of": {}, "max_staleness": 0}', AttachedRing((1, 0), {}, 0)),
    ],
)
def test_logs_of_before_are_read_and_written_as_ever(line, policy):
    assert from_json(json.loads(line)) == policy
    assert json.dumps(to_json(policy)) == line


def test_policies_inside_policies_are_kept():
    policy = DropCompute(0.25, LocalSGD(4, GroupedRing((0,), ((2, 1),), {2: 0}, 3)))
    data = json.loads(json.dumps(to_json(policy)))
    assert data["inner"]["inner"]["clusters"] == [[2, 1]]
    assert from_json(data) == policy


def test_what_is_left_out_has_its_default():
    assert from_json({"name": "ASP"}) == ASP()
    assert from_json({"name": "LocalSGD", "local_steps": 2}) == LocalSGD(2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "Hogwild"}, "unknown policy 'Hogwild'; known are BSP, KSync, "),
        ({"k": 3}, "unknown policy None"),
        ({"name": "KSync"}, r"KSync takes \['k', 'late'\] and needs \['k'\], got \[\]"),
        ({"name": "KSync", "k": 3, "quorum": 3}, r"got \['k', 'quorum'\]"),
        ({"name": "KSync", "k": 0}, "k must be >= 1"),
        ({"name": "KSync", "k": "three"}, "KSync cannot take {'k': 'three'}"),
        ({"name": "AttachedRing", "ring": [0], "parent_of": {"one": 0}}, "'one'"),
        ({"name": "LocalSGD", "local_steps": 2, "inner": {"name": "Sync"}}, "unknown policy 'Sync'"),
        ({"name": "LocalSGD", "local_steps": 2, "inner": 3}, "LocalSGD cannot take"),
        ({"name": "GroupSync", "groups": 3}, "GroupSync cannot take"),
        ({"name": "GroupSync", "_group_of": {}}, "got \\['_group_of'\\]"),
    ],
)
def test_what_cannot_be_read_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        from_json(data)


def test_a_policy_that_is_not_in_the_catalog_is_refused():
    with pytest.raises(ValueError, match="is not in the catalog; known are BSP"):
        to_json(object())


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("bsp", BSP()),
        (" BSP ", BSP()),
        ("ksync:3", KSync(3)),
        ("ksync:3:join_next", KSync(3, "join_next")),
        ("deadline:0.5", Deadline(0.5)),
        ("deadline:2:cancel", Deadline(2.0, "cancel")),
        ("ssp:4", SSP(4)),
        ("asp", ASP()),
        ("asp:16", ASP(16)),
        ("kasync:4", KAsync(4)),
        ("zeno", Zeno()),
        ("zeno:0.01", Zeno(0.01)),
        ("zeno:0.01:0.1:4", Zeno(0.01, 0.1, 4)),
        ("groups:0-1-2,3", GroupSync(((0, 1, 2), (3,)))),
        ("groups:3-0-1-2", GroupSync(((3, 0, 1, 2),))),
        ("ring:0-1-3;2>0", AttachedRing((0, 1, 3), {2: 0})),
        ("ring:0-3;1>0;2>3:5", AttachedRing((0, 3), {1: 0, 2: 3}, 5)),
        ("ring:0-1-2-3", AttachedRing((0, 1, 2, 3))),
        ("ring:0;3-1>0;2>0", GroupedRing((0,), ((3, 1), (2,)), {3: 0, 2: 0})),
        ("ring:0;3-1-2>0:2", GroupedRing((0,), ((3, 1, 2),), {3: 0}, 2)),
        ("local:8", LocalSGD(8)),
        ("local:8+ksync:3:cancel", LocalSGD(8, KSync(3, "cancel"))),
        ("dropcompute:0.2", DropCompute(0.2)),
        ("DropCompute:0.2+local:4+ring:0-1-3;2>1", DropCompute(0.2, LocalSGD(4, AttachedRing((0, 1, 3), {2: 1})))),
    ],
)
def test_names_on_the_command_line(text, policy):
    assert parse(text, 4) == policy
    assert type(parse(text, 4)) is type(policy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown policy ''; wanted one of bsp, ksync:K"),
        ("sync:3", "unknown policy 'sync:3'"),
        ("bsp:3", "cannot read policy 'bsp:3': 1 arguments; wanted bsp for 4 ranks"),
        ("ksync", "0 arguments; wanted ksync:K"),
        ("ksync:3:drop:2", "3 arguments"),
        ("ksync:six", "'six' is not a whole number"),
        ("ksync:5", "5 gradients cannot come from 4 ranks"),
        ("kasync:0", "0 gradients"),
        ("ksync:3:later", "late must be one of"),
        ("deadline:soon", "'soon' is not a number"),
        ("deadline:-1", "after_s must be positive"),
        ("ssp:-1", "bound must be >= 0"),
        ("asp:1.5", "'1.5' is not a whole number"),
        ("zeno:0.1:0:0:0", "4 arguments"),
        ("groups:0-1,3", r"ranks 0\.\.3 must be named once each, got \[0, 1, 3\]"),
        ("groups:0-1-2,2-3", r"got \[0, 1, 2, 2, 3\]"),
        ("groups:0-1-2,", "'' is not a whole number"),
        ("ring:0-1;2>0", r"got \[0, 1, 2\]"),
        ("ring:0-1-3;2", "'2' names no parent"),
        ("ring:0-1-3;2>2", "parents must be in the ring"),
        ("ring:0-1-3;4>0", r"got \[0, 1, 3, 4\]"),
        ("local:0", "local_steps must be >= 1"),
        ("local:2+local:3", "local steps inside local steps"),
        ("local:2+", "unknown policy ''"),
        ("ksync:3+bsp", "there is nothing to go inside"),
        ("dropcompute:0", "limit_s must be positive"),
    ],
)
def test_a_name_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text, 4)


def test_there_must_be_ranks():
    with pytest.raises(ValueError, match="num_ranks=0"):
        parse("bsp", 0)
