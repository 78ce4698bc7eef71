"""The torch decoder against its definition, written out with numpy in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from torch_impl.models import Decoder, DecoderConfig, next_token_loss

TINY = DecoderConfig(
    vocab_size=19, d_model=21, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, d_ff=13, rope_theta=100
)


def _decoder(config: DecoderConfig = TINY, seed: int = 3, dtype: torch.dtype = torch.float64) -> Decoder:
    decoder = Decoder(config).to(dtype)
    decoder.init_weights(seed)
    return decoder


def _tokens(batch: int, length: int, seed: int = 0, vocab: int = TINY.vocab_size) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, (batch, length)))


def _numpy_decoder(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """The forward pass head by head and position by position."""
    config = decoder.config
    w = {name: p.detach().double().numpy() for name, p in decoder.named_parameters()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * w[name]

    def rotate(x, position):
        half = config.head_dim // 2
        angle = position * config.rope_theta ** (-2 * np.arange(half) / config.head_dim)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    def attention(x, prefix):
        dh, group = config.head_dim, config.n_heads // config.n_kv_heads
        q, k, v = (x @ w[f"{prefix}.w{c}.weight"].T for c in "qkv")
        out = np.zeros((len(x), config.n_heads * dh))
        for head in range(config.n_heads):
            kv = slice(head // group * dh, (head // group + 1) * dh)
            for t in range(len(x)):
                query = rotate(q[t, head * dh : (head + 1) * dh], t)
                scores = np.array([query @ rotate(k[s, kv], s) for s in range(t + 1)]) / np.sqrt(dh)
                p = np.exp(scores - scores.max())
                out[t, head * dh : (head + 1) * dh] = p / p.sum() @ v[: t + 1, kv]
        return out @ w[f"{prefix}.wo.weight"].T

    def mlp(x, prefix):
        both = x @ w[f"{prefix}.w13.weight"].T
        gate, up = both[:, : config.d_ff], both[:, config.d_ff :]
        return (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}.w2.weight"].T

    logits = []
    for row in tokens:
        x = w["embed.weight"][row]
        for i in range(config.n_layers):
            x = x + attention(norm(x, f"layers.{i}.attention_norm.weight"), f"layers.{i}.attention")
            x = x + mlp(norm(x, f"layers.{i}.mlp_norm.weight"), f"layers.{i}.mlp")
        head = w["embed.weight" if config.tied else "lm_head.weight"]
        logits.append(norm(x, "norm.weight") @ head.T)
    return np.stack(logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(6, 2), (5, 5), (3, 1)])
def test_logits_and_loss_equal_the_definition_in_float64(tied, n_heads, n_kv_heads):
    decoder = _decoder(replace(TINY, tied=tied, n_heads=n_heads, n_kv_heads=n_kv_heads))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8)  # a nearly linear model would hide a wrong softmax or rotation
    tokens, targets = _tokens(2, 7), _tokens(2, 7, seed=1)
    expected = _numpy_decoder(decoder, tokens.numpy())
    logits = decoder(tokens)
    assert logits.dtype == torch.float64
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-11, atol=1e-11)
    log_z = np.log(np.exp(expected - expected.max(-1, keepdims=True)).sum(-1)) + expected.max(-1)
    picked = np.take_along_axis(expected, targets.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(next_token_loss(logits, targets).item(), (log_z - picked).mean(), rtol=1e-12)


def test_a_token_changes_no_earlier_logits_and_all_later_ones():
    decoder = _decoder()
    tokens = _tokens(1, 9)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % TINY.vocab_size
    before, after = decoder(tokens)[0], decoder(changed)[0]
    assert torch.equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).any(-1).all()


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values():
    grouped = _decoder()
    full = _decoder(replace(TINY, n_kv_heads=TINY.n_heads))
    weights = dict(grouped.state_dict())
    for name in list(weights):
        if name.endswith(("wk.weight", "wv.weight")):
            heads = weights[name].unflatten(0, (TINY.n_kv_heads, TINY.head_dim))
            weights[name] = heads.repeat_interleave(TINY.n_heads // TINY.n_kv_heads, 0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(full(_tokens(2, 6)), grouped(_tokens(2, 6)), rtol=1e-12, atol=1e-12)


def test_a_tied_decoder_has_no_head_and_trains_the_embedding_from_both_uses():
    tied, untied = _decoder(replace(TINY, tied=True)), _decoder()
    assert "lm_head.weight" not in dict(tied.named_parameters())
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.embed.weight.detach().clone()})
    tokens, targets = _tokens(2, 5), _tokens(2, 5, seed=1)
    for decoder in (tied, untied):
        next_token_loss(decoder(tokens), targets).backward()
    gradients = {name: p.grad for name, p in untied.named_parameters()}
    torch.testing.assert_close(
        tied.embed.weight.grad, gradients["embed.weight"] + gradients["lm_head.weight"]
    )


def test_weights_depend_on_seed_and_name_only():
    weights = dict(_decoder(seed=5).named_parameters())
    torch.manual_seed(99)
    again = dict(_decoder(seed=5).named_parameters())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other = dict(_decoder(seed=6).named_parameters())
    assert not any(torch.equal(weights[name], other[name]) for name in weights)
    assert not torch.equal(weights["layers.0.mlp.w2.weight"], weights["layers.1.mlp.w2.weight"])
    single = dict(_decoder(seed=5, dtype=torch.float32).named_parameters())
    assert all(torch.equal(single[name], weights[name].float()) for name in weights)


def test_weights_have_the_documented_spread_and_are_pinned_across_versions():
    decoder = _decoder(DecoderConfig(), seed=1)
    spread = {name: p.std().item() for name, p in decoder.named_parameters()}
    assert spread["layers.0.attention.wq.weight"] == pytest.approx(0.02, rel=0.02)
    assert spread["layers.3.attention.wo.weight"] == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert spread["layers.3.mlp.w2.weight"] == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert spread["layers.2.mlp_norm.weight"] == pytest.approx(0.1, rel=0.2)
    assert decoder.norm.weight.mean().item() == pytest.approx(1, abs=0.03)
    assert decoder.embed.weight[0, :2].tolist() == [-0.011210483951785286, 0.0034008826538976127]


def test_the_default_decoder_has_odd_shapes_and_the_expected_names():
    decoder = Decoder(DecoderConfig())
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    assert sum(p.numel() for p in decoder.parameters()) == 4_739_589
    assert shapes["embed.weight"] == shapes["lm_head.weight"] == (257, 331)
    block = {
        "attention_norm.weight": (331,),
        "attention.wq.weight": (320, 331),
        "attention.wk.weight": (80, 331),
        "attention.wv.weight": (80, 331),
        "attention.wo.weight": (331, 320),
        "mlp_norm.weight": (331,),
        "mlp.w13.weight": (1766, 331),
        "mlp.w2.weight": (331, 883),
    }
    expected = {f"layers.{i}.{name}": shape for i in range(4) for name, shape in block.items()}
    assert {k: v for k, v in shapes.items() if k.startswith("layers.")} == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrower_dtypes_stay_close_to_float64_and_train(dtype, tolerance):
    exact, narrow = _decoder(), _decoder(dtype=dtype)
    tokens, targets = _tokens(3, 8), _tokens(3, 8, seed=1)
    logits = narrow(tokens)
    assert logits.dtype == dtype
    loss = next_token_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(next_token_loss(exact(tokens), targets).item(), rel=tolerance)
    loss.backward()
    assert all(p.grad.dtype == dtype and p.grad.abs().sum() > 0 for p in narrow.parameters())


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (1, 17), (0, 4)])
def test_odd_batches_and_lengths_have_logits_of_their_shape(batch, length):
    assert _decoder()(_tokens(batch, length)).shape == (batch, length, TINY.vocab_size)


def test_a_forward_in_inference_mode_does_not_spoil_a_later_backward():
    decoder = _decoder()
    with torch.inference_mode():
        decoder(_tokens(1, 11))
    next_token_loss(decoder(_tokens(1, 11)), _tokens(1, 11, seed=1)).backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model: expected an int >= 1, got 0"),
        ({"n_layers": 2.0}, r"n_layers: expected an int >= 1, got 2\.0"),
        ({"rope_theta": True}, "rope_theta: expected an int >= 1, got True"),
        ({"head_dim": 5}, "head_dim: expected an even number .* got 5"),
        ({"n_kv_heads": 4}, "n_heads: expected a multiple of n_kv_heads=4, got 6"),
        ({"norm_eps": 0.0}, r"norm_eps: expected a number > 0, got 0\.0"),
        ({"tied": 1}, "tied: expected a bool, got 1"),
    ],
)
def test_a_bad_config_raises_with_what_was_expected_and_found(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_a_seed_outside_64_bits_raises():
    with pytest.raises(ValueError, match="seed: expected 0 <= seed"):
        Decoder(TINY).init_weights(-1)
