import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl.models import Decoder, DecoderConfig, next_token_loss
from tests.support.jax_impl.tiny import CONFIG, decoder, loss, named, tokens


def reference_logits(weights, config, ids):
    """The decoder in NumPy, one head and one position at a time where that is clearer."""
    w = {path: np.asarray(value, np.float64) for path, value in weights.items()}

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rotary(x):
        half = config.head_dim // 2
        out = np.empty_like(x)
        for position in range(x.shape[0]):
            for i in range(half):
                angle = position * float(config.rope_theta) ** (-2 * i / config.head_dim)
                a, b = x[position, i], x[position, half + i]
                out[position, i] = a * np.cos(angle) - b * np.sin(angle)
                out[position, half + i] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def attend(x, at):
        length = len(x)
        out = np.zeros_like(x)
        for head in range(config.n_heads):
            shared = head // (config.n_heads // config.n_kv_heads)
            q = rotary(x @ w[f"{at}/query/kernel"][:, head])
            k = rotary(x @ w[f"{at}/key/kernel"][:, shared])
            v = x @ w[f"{at}/value/kernel"][:, shared]
            scores = q @ k.T / np.sqrt(config.head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out += (p / p.sum(-1, keepdims=True)) @ v @ w[f"{at}/out/kernel"][head]
        return out

    def feed(x, at):
        gate = x @ w[f"{at}/gate/kernel"]
        return (gate / (1 + np.exp(-gate)) * (x @ w[f"{at}/up/kernel"])) @ w[f"{at}/down/kernel"]

    logits = []
    for row in ids:
        x = w["embed/embedding"][row]
        for i in range(config.n_layers):
            x = x + attend(norm(x, w[f"layers/{i}/attention_norm/scale"]), f"layers/{i}/attention")
            x = x + feed(norm(x, w[f"layers/{i}/mlp_norm/scale"]), f"layers/{i}/mlp")
        x = norm(x, w["norm/scale"])
        logits.append(x @ (w["embed/embedding"].T if config.tied else w["lm_head/kernel"]))
    return np.array(logits)


def config_with(**changes):
    return DecoderConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__}, **changes})


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_a_plain_numpy_decoder_in_float64(tied):
    config = config_with(tied=tied)
    with jax.enable_x64(True):
        model = decoder(config, jnp.float64)
        ids = tokens(3)
        logits = nnx.jit(lambda model: model(ids))(model)
        assert logits.dtype == jnp.float64
        expected = reference_logits(named(nnx.state(model)), config, ids)
        np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 5e-2)])
def test_logits_in_lower_precision_are_close_and_keep_the_dtype(dtype, tolerance):
    model = decoder(dtype=dtype)
    logits = nnx.jit(lambda model: model(tokens(3)))(model)
    assert logits.dtype == dtype
    expected = reference_logits(named(nnx.state(model)), CONFIG, tokens(3))
    error = np.linalg.norm(np.asarray(logits, np.float64) - expected) / np.linalg.norm(expected)
    assert error < tolerance


def test_parameter_paths_and_shapes_are_those_of_the_contract():
    d, f, h, kv, k = 331, 883, 8, 2, 40
    block = {
        "attention_norm/scale": (d,),
        "attention/query/kernel": (d, h, k),
        "attention/key/kernel": (d, kv, k),
        "attention/value/kernel": (d, kv, k),
        "attention/out/kernel": (h, k, d),
        "mlp_norm/scale": (d,),
        "mlp/gate/kernel": (d, f),
        "mlp/up/kernel": (d, f),
        "mlp/down/kernel": (f, d),
    }
    expected = {"embed/embedding": (257, d), "norm/scale": (d,), "lm_head/kernel": (d, 257)}
    expected |= {f"layers/{i}/{name}": shape for i in range(4) for name, shape in block.items()}
    model = nnx.eval_shape(lambda: Decoder(DecoderConfig(), rngs=nnx.Rngs(0)))
    shapes = {path: value.shape for path, value in named(nnx.state(model)).items()}
    assert shapes == expected
    assert sum(np.prod(shape) for shape in shapes.values()) == 4_739_589


def test_a_token_changes_no_earlier_logits():
    model = decoder()
    ids = tokens(2)
    changed = ids.copy()
    changed[:, 4] = (changed[:, 4] + 1) % CONFIG.vocab_size
    before, after = model(ids), model(changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.all(np.abs(before[:, 4:] - after[:, 4:]).max(-1) > 0)


def test_next_token_loss_is_the_mean_negative_log_probability_of_the_next_token():
    model = decoder()
    ids = tokens(3)
    logits = reference_logits(named(nnx.state(model)), CONFIG, ids[:, :-1])
    chosen = np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - chosen)
    np.testing.assert_allclose(nnx.jit(loss)(model, ids), expected, rtol=1e-5)


def test_the_loss_of_bfloat16_logits_is_computed_in_float32():
    logits = jnp.linspace(-3, 3, 4 * 11).reshape(4, 11).astype(jnp.bfloat16)
    mean = next_token_loss(logits, jnp.arange(4))
    assert mean.dtype == jnp.float32
    wide = np.asarray(logits, np.float64)
    expected = np.mean(np.log(np.exp(wide).sum(-1)) - wide[np.arange(4), np.arange(4)])
    np.testing.assert_allclose(mean, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "n_heads: expected a multiple of n_kv_heads = 2, got 5"),
        ({"head_dim": 7}, "head_dim: expected an even size"),
        ({"d_ff": 0}, "d_ff: expected a value >= 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_with(**changes)
