"""What an update does, against the same written out."""

import math

import pytest
import torch

from innerloop.lm import Config, LanguageModel
from innerloop.training import Learner, TrainingOptions
from innerloop.training.learner import decayed_groups


def made(**changed):
    torch.manual_seed(0)
    return LanguageModel(Config(**{"vocab_size": 19, "width": 8, "heads": 2, "pattern": "kda", **changed}))


def batch(rows=4):
    return torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(3))


def test_updates_are_adamws_on_the_mean_loss_clipped():
    options = TrainingOptions(steps=5, batch=4, length=8, rate=1e-2, warmup=2, weight_decay=0.3, clip=0.1)
    learner, twin = Learner(made(), options), made()
    first = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    decayed = {id(p) for p in decayed_groups(twin, 0.3)[0]["params"]}
    for step in range(3):
        update = learner.update(batch(), step)
        twin.zero_grad()
        logits, _ = twin(batch()[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch()[:, 1:].flatten())
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in twin.parameters()))
        assert update.loss == pytest.approx(loss.item(), rel=1e-5)
        assert update.norm == pytest.approx(norm, rel=1e-4)
        with torch.no_grad():
            for name, p in twin.named_parameters():
                grad = p.grad * min(1, 0.1 / norm)
                p.mul_(1 - update.rate * 0.3 * (id(p) in decayed))
                first[name].mul_(0.9).add_(0.1 * grad)
                second[name].mul_(0.95).add_(0.05 * grad**2)
                mean, spread = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.95 ** (step + 1))
                p.sub_(update.rate * mean / (spread.sqrt() + 1e-8))
        for name, p in learner.model.named_parameters():
            torch.testing.assert_close(p, twin.get_parameter(name), rtol=1e-4, atol=2e-5, msg=name)


def test_norms_gates_biases_and_embeddings_do_not_decay():
    for tied in (True, False):
        model = made(pattern="gated_delta_rule+rwkv7", tied=tied)
        decayed, others = (group["params"] for group in decayed_groups(model, 0.1))
        names = {id(p): name for name, p in model.named_parameters()}
        assert sorted(names) == sorted(id(p) for p in [*decayed, *others])
        decayed = {names[id(p)] for p in decayed}
        assert not any("norm" in x or "A_log" in x or "dt_bias" in x or "bias" in x for x in decayed)
        assert "embedding.weight" not in decayed
        assert ("head.weight" in decayed) != tied
        assert any("query" in x for x in decayed)


def test_the_rate_rises_then_falls_by_a_cosine():
    options = TrainingOptions(steps=110, rate=2.0, warmup=10, final_rate=0.25)
    assert [options.rate_at(step) for step in (0, 4, 9, 10)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert options.rate_at(60) == pytest.approx(2 * (0.25 + 0.75 / 2))
    assert options.rate_at(110) == pytest.approx(0.5)
    rates = [options.rate_at(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert TrainingOptions(steps=3, warmup=3).rate_at(2) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1; got 0"),
        ({"batch": 2.5}, TypeError, "batch must be a whole number; got 2.5"),
        ({"batch": True}, TypeError, "batch must be a whole number; got True"),
        ({"rate": 0.0}, ValueError, "rate must be finite and above 0"),
        ({"rate": math.nan}, ValueError, "rate must be finite"),
        ({"rate": "x"}, TypeError, "rate must be a number"),
        ({"warmup": 11}, ValueError, r"warmup must lie in \[0, steps=10\]; got 11"),
        ({"final_rate": 1.5}, ValueError, "final_rate must lie"),
        ({"precision": "half"}, ValueError, "precision must be one of float32, bfloat16; got 'half'"),
        ({"clip": -1.0}, ValueError, "clip must be at least 0"),
        ({"clip": math.nan}, ValueError, "clip must be at least 0"),
        ({"beta2": 1.0}, ValueError, "beta2 must lie"),
        ({"part": 0}, ValueError, "part must be at least 1"),
    ],
)
def test_options_cannot_be_half_wrong(changed, error, words):
    with pytest.raises(error, match=words):
        TrainingOptions(**{"steps": 10, **changed})
    assert TrainingOptions.from_dict(TrainingOptions(steps=10).to_dict()) == TrainingOptions(steps=10)
    with pytest.raises(ValueError, match="an unknown 'stops'"):
        TrainingOptions.from_dict({"steps": 10, "stops": 3})


def test_moments_go_to_another_learner_and_no_other_model():
    options = TrainingOptions(steps=5)
    learner, other = Learner(made(), options), Learner(made(), options)
    other.set_moments(learner.moments())  # none yet
    learner.update(batch(), 0)
    other.model.load_state_dict(learner.model.state_dict())
    other.set_moments({name: x.clone() for name, x in learner.moments().items()})
    assert learner.update(batch(), 1) == other.update(batch(), 1)
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, other.model.get_parameter(name))
    for wrong in (made(pattern="mamba2"), made(width=16)):
        with pytest.raises(ValueError, match="the optimizer's moments"):
            Learner(wrong, options).set_moments(learner.moments())
