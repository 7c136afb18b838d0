"""Writing on: what is chosen, where it stops, and that it depends on nothing else."""

import pytest
import torch

from innerloop.lm.sampling import Sampling


def greedy(model, tokens, count):
    """Return what the likeliest tokens are, from whole forwards without a state."""
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[0][:, -1:].argmax(-1)), 1)
    return tokens[:, -count:]


def written(model, tokens, **options):
    return torch.stack(list(model.generate(tokens, **options)), 1)


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["hybrid", "gated_delta_rule", "window", "mesa"])
def test_the_likeliest_tokens_are_those_of_whole_forwards(kit, pattern):
    model, tokens = kit.build(pattern), kit.words(3, 6)
    want = greedy(model, tokens, 8)
    assert torch.equal(written(model, tokens, max_new_tokens=8, temperature=0), want)
    assert torch.equal(written(model, tokens, max_new_tokens=8, temperature=1e-8), want)
    assert torch.equal(written(model, tokens, max_new_tokens=8, top_k=1), want)
    assert torch.equal(written(model, tokens, max_new_tokens=8, top_p=1e-9), want)
    assert torch.equal(written(model, tokens[:, :1], max_new_tokens=8, temperature=0), greedy(model, tokens[:, :1], 8))
    _, state = model(tokens[:, :4])
    assert torch.equal(written(model, tokens[:, 4:], state=state, max_new_tokens=8, temperature=0), want)


@torch.no_grad()
def test_prompts_of_different_length_go_on_as_if_alone(kit):
    model, tokens = kit.build("hybrid"), kit.words(3, 9)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :6], mask[1, 4:] = 0, 0
    together = written(model, tokens.masked_fill(mask == 0, -1), attention_mask=mask, max_new_tokens=10, temperature=0)
    for n, row in enumerate(tokens):
        assert torch.equal(together[n : n + 1], greedy(model, row[mask[n] == 1][None], 10))


def test_what_is_drawn_from_is_the_softmax_cut_to_the_likeliest():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0], [0.0, 0.0, 5.0, 1.0, 1.0]], dtype=torch.float64)

    def chances(temperature=1.0, top_k=None, top_p=None):
        return Sampling(temperature, top_k, top_p, None).chances(logits)

    plain = (logits / 0.7).softmax(-1)
    assert torch.allclose(chances(0.7), plain)
    for row, p, few in zip(logits, plain, chances(0.7, top_k=2), strict=True):
        kept = few > 0
        assert torch.allclose(few[kept] / few.sum(), p[kept] / p[kept].sum())
        assert kept.sum() >= 2
        assert row[kept].min() > row[~kept].max()
    for top_p in (0.05, 0.5, 0.9, 0.99, 1.0):
        for p, few in zip(plain, chances(0.7, top_p=top_p), strict=True):
            # By brute force: add the likeliest until they reach the chance asked for.
            total, wanted = 0.0, set()
            for i in p.argsort(descending=True, stable=True).tolist():
                if total >= top_p and top_p < 1:
                    break
                wanted.add(i)
                total += p[i].item()
            assert set(few.nonzero()[:, 0].tolist()) == wanted
    assert chances(1e-30).isfinite().all()


def test_draws_have_the_frequencies_of_their_chances():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    drawn = Sampling(1.5, None, None, torch.Generator().manual_seed(0))(logits)
    share = drawn.bincount(minlength=3) / len(drawn)
    assert torch.allclose(share, (logits[0] / 1.5).softmax(-1), atol=0.012)  # 3.5 deviations


def test_a_seeded_generator_repeats_itself_and_leaves_torchs_alone(kit):
    model, tokens = kit.build("kda"), kit.words(2, 3)
    before = torch.get_rng_state()
    runs = [written(model, tokens, max_new_tokens=20, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_row_that_has_ended_repeats_its_end_until_all_have(kit):
    model, tokens = kit.build("hybrid"), kit.words(3, 4)
    free = written(model, tokens, max_new_tokens=40, temperature=0)
    ends = [free[0, 2].item(), free[1, 5].item()]
    got = written(model, tokens, max_new_tokens=40, temperature=0, stop=ends)
    lengths = []
    for row, want in zip(got, free, strict=True):
        hits = [t for t, token in enumerate(want.tolist()) if token in ends]
        last = hits[0] if hits else 39
        lengths.append(last + 1)
        assert torch.equal(row[: last + 1], want[: last + 1][: len(row)])
        assert set(row[last:].tolist()) == {want[last].item()}
    assert got.shape[1] == max(lengths)


def test_tokens_come_as_they_are_made_and_without_end(kit):
    model, calls = kit.build("kda"), []
    hook = model.blocks[0].register_forward_hook(lambda *args: calls.append(1))
    stream = model.generate(kit.words(2, 3), temperature=0)
    for count in range(1, 50):
        assert next(stream).shape == (2,)
        assert len(calls) == count
    hook.remove()
    assert len(list(model.generate(kit.words(2, 3), max_new_tokens=0))) == 0


def test_a_model_in_training_writes_as_in_evaluation(kit):
    model, tokens = kit.build("hybrid", dropout=0.5), kit.words(2, 4)
    want = written(model, tokens, max_new_tokens=6, temperature=0)
    model.train()
    for token, truth in zip(model.generate(tokens, max_new_tokens=6, temperature=0), want.T, strict=True):
        assert torch.equal(token, truth)
        assert model.training
        assert model.blocks[0].dropout.training
        assert not token.requires_grad
        assert not token.is_inference()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"temperature": -1}, ValueError, "temperature must be finite and at least 0; got -1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"top_k": 0}, ValueError, "top_k must be a whole number of at least 1"),
        ({"top_p": 0.0}, ValueError, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.5}, ValueError, "top_p must lie"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be a whole number"),
        ({"generator": 3}, TypeError, r"generator must be a torch\.Generator"),
        ({"stop": [99]}, ValueError, r"stop must hold tokens in \[0, vocab_size=23\); got 99"),
        ({"attention_mask": torch.tensor([[0, 0], [0, 1]])}, ValueError, "at least one real token a row"),
    ],
)
def test_wrong_options_are_said_before_the_first_token(kit, options, kind, message):
    model = kit.build("kda")
    with pytest.raises(kind, match=message):
        model.generate(kit.words(2, 2), **options)
    with pytest.raises(ValueError, match=r"at least one token a row"):
        model.generate(kit.words(2, 0))
