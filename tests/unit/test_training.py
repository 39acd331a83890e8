"""Real training in virtual time: exact gradients at stale parameters, torch's optimizers, every sample leased once."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from paceline.sim.models import MLP, CharTransformer, CNN1d
from paceline.sim.optimizers import SGD, Adam
from paceline.sim.tasks import CHARS, DIGITS, MNIST1D
from paceline.sim.training import Contribution, Draw, TaskLearner

TASKS = (DIGITS, MNIST1D, CHARS)


def learner_of(task=DIGITS, updates: int = 3, keep: bool = True, seed: int = 0, **rest) -> TaskLearner:
    """A learner after some updates of two ranks."""
    learner = TaskLearner(task, seed=seed, **rest)
    for version in range(updates):
        learner.update([Contribution(rank, version, (learner.draw(rank, 8),)) for rank in range(2)], 1.0)
        if not keep:
            learner.forget(version + 1)
    return learner


def loss(model, parameters, inputs, targets) -> float:
    """Mean cross-entropy, in double precision."""
    logits = torch.from_numpy(np.asarray(model.logits(parameters, inputs), np.float64))
    return float(torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.tensor(targets.ravel())))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_gradients_are_the_slope_of_the_loss(task):
    data, model = task.load(), task.model
    rng = np.random.default_rng(1)
    inputs, targets = data.train_inputs[:12], data.train_targets[:12]
    parameters = model.initial(0) + rng.normal(0, 0.01, model.initial(0).shape).astype(np.float32)
    gradient = model.gradient(parameters, inputs, targets)
    assert gradient.shape == parameters.shape
    assert gradient.dtype == np.float32
    # Along the gradient itself the slope is its norm; along a random mixture of coordinates it is the inner product.
    along = gradient / np.linalg.norm(gradient)
    for direction in (along, along * rng.uniform(0.0, 2.0, along.shape).astype(np.float32)):
        step = np.float32(2e-3) * direction
        slope = (
            loss(model, parameters + step, inputs, targets) - loss(model, parameters - step, inputs, targets)
        ) / 4e-3
        assert slope == pytest.approx(float(gradient @ direction), rel=0.02)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (SGD(0.0), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adam(), lambda p: torch.optim.Adam(p, lr=0.1)),
    ],
    ids=["sgd-momentum", "sgd", "adam"],
)
def test_optimizers_are_torchs(ours, theirs):
    rng = np.random.default_rng(0)
    state = ours.init(rng.normal(size=50).astype(np.float32))
    parameter = torch.nn.Parameter(torch.tensor(state.parameters))
    optimizer = theirs([parameter])
    for step in range(20):
        gradient = rng.normal(size=50).astype(np.float32)
        lr = 0.1 / (1 + step)  # the rate changes on the way, as it does by a schedule
        state = ours.step(state, gradient, lr)
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        np.testing.assert_allclose(state.parameters, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_stale_gradient_is_that_of_the_version_it_began_from(task):
    learner = learner_of(task)
    draw = learner.draw(0, 8)
    samples = learner.indices(draw)
    data = task.load()
    for version in range(4):
        want = task.model.gradient(learner.parameters(version), data.train_inputs[samples], data.train_targets[samples])
        np.testing.assert_array_equal(learner.gradient(Contribution(0, version, (draw,))), want)


@pytest.mark.parametrize("versions", [(3, 3, 3), (3, 1, 3), (0, 1, 2)])
def test_an_update_is_the_sample_weighted_mean(versions):
    merged, single = learner_of(), learner_of()
    sizes = (4, 8, 16)
    contributions = [
        Contribution(rank, version, (merged.draw(rank, size),), weight=1.0 if rank else 0.5)
        for rank, (version, size) in enumerate(zip(versions, sizes, strict=True))
    ]
    for c in contributions:
        assert single.draw(c.rank, c.num_samples) == c.draws[0]
    mean = sum(np.float32(c.weight * c.num_samples / 28) * single.gradient(c) for c in contributions)
    merged.update(contributions, lr_scale=0.5)
    before = learner_of()._states[3]
    want = DIGITS.optimizer.step(before, mean, DIGITS.lr_at(48) * 0.5)
    np.testing.assert_allclose(merged.parameters(), want.parameters, rtol=1e-4, atol=1e-6)
    assert merged.num_samples_trained == 48 + 28


def test_every_sample_of_an_epoch_is_leased_once_over_all_ranks():
    learner = TaskLearner(DIGITS)
    size = len(DIGITS.load().train_inputs)
    draws = [learner.draw(rank % 3, 1 + rank % 7) for rank in range(2 * size)]
    assert all(a.start + a.num_samples == b.start for a, b in pairwise(draws))
    stream = np.concatenate([learner.indices(draw) for draw in draws])
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert not np.array_equal(stream[:size], stream[size : 2 * size])


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    one, same, other = learner_of(seed=1), learner_of(seed=1), learner_of(seed=2)
    np.testing.assert_array_equal(one.parameters(), same.parameters())
    assert not np.array_equal(one.parameters(), other.parameters())


def test_forgetting_frees_what_nobody_computes_from():
    learner = learner_of(updates=6)
    assert learner.num_versions_held == 7
    learner.forget(4)
    assert learner.num_versions_held == 3
    with pytest.raises(ValueError, match="version 3 is not held"):
        learner.gradient(Contribution(0, 3, (learner.draw(0, 8),)))
    learner.forget(100)
    assert learner.num_versions_held == 1  # the newest always stays


def test_one_local_step_each_is_an_update_of_models_by_gradients():
    plain = replace(DIGITS, optimizer=SGD(0.0))
    by_gradient, by_model = learner_of(plain), learner_of(plain)
    draws = [(by_gradient.draw(rank, 8), by_gradient.draw(rank, 8)) for rank in range(2)]
    for rank in range(2):
        assert (by_model.draw(rank, 8), by_model.draw(rank, 8)) == draws[rank]
    by_model.update([Contribution(rank, 3, draws[rank]) for rank in range(2)], 1.0)
    rate = plain.lr_at(48)
    start, ends = by_gradient.parameters(3), []
    data = plain.load()
    for rank in range(2):
        parameters = start
        for draw in draws[rank]:
            samples = by_gradient.indices(draw)
            slope = plain.model.gradient(parameters, data.train_inputs[samples], data.train_targets[samples])
            parameters = parameters - np.float32(rate) * slope
        ends.append(parameters)
    np.testing.assert_allclose(by_model.parameters(), (ends[0] + ends[1]) / 2, rtol=1e-4, atol=1e-6)


def test_noise_and_scores():
    learner = learner_of(updates=40, keep=False, noise_every=2)
    noise = learner.noise()
    assert noise is not None
    assert 0 <= noise.low <= noise.value <= noise.high
    own = Contribution(0, learner.version, (learner.draw(0, 64),))
    score = learner.score(own)
    gradient = learner.gradient(own)
    assert score.norm_sq == pytest.approx(float(gradient @ gradient), rel=1e-5)
    assert abs(score.dot) <= (score.norm_sq * score.trusted_norm_sq) ** 0.5 * 1.0001


def test_bad_input_is_refused():
    learner = learner_of()
    with pytest.raises(ValueError, match="no draws"):
        Contribution(0, 0, ())
    with pytest.raises(ValueError, match="got"):
        Draw(0, 0)
    with pytest.raises(ValueError, match="needs contributions"):
        learner.update([], 1.0)
    with pytest.raises(ValueError, match="lr_scale > 0"):
        learner.update([Contribution(0, 3, (learner.draw(0, 8),))], 0.0)
    with pytest.raises(ValueError, match="version 9 is not held"):
        learner.update([Contribution(0, 9, (learner.draw(0, 8),))], 1.0)
    with pytest.raises(ValueError, match="seed"):
        TaskLearner(DIGITS, seed=-1)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_rate_rises_holds_and_falls(task):
    at = [task.lr_at(round(task.budget_samples * part)) for part in (0.0, 0.05, 0.5, 0.75, 1.0, 2.0)]
    assert at[0] < at[1] == pytest.approx(task.lr) == pytest.approx(at[2])
    assert at[2] > at[3] > at[4] == at[5] > 0


@pytest.mark.parametrize(
    "model", [MLP(64, 32, 10), CNN1d(40, (16, 32, 32), (5, 3, 3), 10), CharTransformer(30, 8, 16, 2, 1, 32)]
)
def test_initial_parameters_follow_the_seed(model):
    np.testing.assert_array_equal(model.initial(3), model.initial(3))
    assert not np.array_equal(model.initial(3), model.initial(4))


def test_training_learns():
    learner = learner_of(updates=60, keep=False)
    assert learner.accuracy() > 0.6
