"""Llama 3: golden counts, equality with transformers, generation."""

import dataclasses

import pytest
import torch

from functitan import random, tree
from functitan.autodiff import value_and_grad
from functitan.errors import ConfigError
from functitan.nn.models import llama3
from functitan.nn.models.llama3 import FLAVORS, Llama3Config
from functitan.nn.rope import RopeScaling

GOLDEN = {  # parameters, then FLOPs per token at 2048, 4096 and 8192
    "debugmodel": (6_163_712, 71_585_280, 109_334_016, 184_831_488),
    "1B": (1_235_814_400, 8_220_192_768, 9_025_499_136, 10_636_111_872),
    "3B": (3_212_749_824, 21_390_428_160, 23_504_357_376, 27_732_215_808),
    "8B": (8_030_261_248, 48_250_773_504, 51_471_998_976, 57_914_449_920),
    "70B": (70_553_706_496, 433_124_327_424, 449_230_454_784, 481_442_709_504),
    "405B": (405_853_388_800, 2_473_246_556_160, 2_523_980_857_344, 2_625_449_459_712),
}

TINY = Llama3Config(dim=64, layers=3, heads=8, kv_heads=2, mlp_dim=96, vocab=101)


def make_params(config, seed=0):
    """Random parameters of the declared shapes; norms and embeddings too, so that no factor hides."""
    key, declared = random.key(seed), llama3.declare(config)
    std = {"tok_embeddings": 1.0}
    return tree.map_with_path(
        lambda path, p: (
            random.normal(random.fold_in(key, path), p.shape) * std.get(path, 0.1)
            + (1.0 if path.endswith("norm") else 0.0)
        ),
        declared,
    )


@pytest.mark.parametrize("name", list(FLAVORS))
def test_golden_counts(name):
    config = FLAVORS[name]
    found = (llama3.num_params(config), *(llama3.flops_per_token(config, s) for s in (2048, 4096, 8192)))
    assert found == GOLDEN[name]


def to_transformers(params, config):
    """The same weights as a transformers model, in its layouts: (out, in), and rotations split by halves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = config.rope_scaling
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": config.rope_theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.dim,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tied,
            max_position_embeddings=config.max_seq,
            attn_implementation="eager",
        )
    ).eval()

    def halves(w_DHK):  # neighbours (0, 1), (2, 3), ... become the pairs (0, K/2), (1, K/2 + 1), ...
        d, k = w_DHK.shape[0], config.head_dim
        return w_DHK.reshape(d, -1, k // 2, 2).transpose(2, 3).reshape(d, -1)

    names = {
        "attn_norm": "input_layernorm",
        "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    weights = {"model.embed_tokens.weight": params["tok_embeddings"], "model.norm.weight": params["norm"]}
    weights["lm_head.weight"] = params["tok_embeddings"] if config.tied else params["head"].T
    for ours, theirs in names.items():
        for layer, w in enumerate(params["layers"][ours]):
            w = halves(w) if ours in ("wq", "wk") else w
            weights[f"model.layers.{layer}.{theirs}.weight"] = w.T if w.ndim == 2 else w
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, RopeScaling(original_context=16)])
def test_logits_equal_transformers(tied, scaling):
    config = Llama3Config(64, 3, 8, 2, 96, 101, tied=tied, rope_scaling=scaling, max_seq=128)
    params, tokens = make_params(config), random.randint(random.key(1), (2, 48), 0, config.vocab)
    mine = llama3.forward(params, tokens, config)
    with torch.no_grad():
        theirs = to_transformers(params, config)(tokens).logits
    assert ((mine - theirs).abs().max() / theirs.abs().max()).item() < 1e-5


def test_cached_greedy_equals_uncached():
    params, prompt = make_params(TINY), random.randint(random.key(2), (2, 5), 0, TINY.vocab)
    cached = llama3.generate(params, prompt, TINY, max_new_tokens=12)
    tokens = prompt
    for _ in range(12):
        chosen = llama3.forward(params, tokens, TINY)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, chosen], dim=1)
    assert torch.equal(cached, tokens)


def test_decode_logits_equal_forward_and_leave_the_cache_alone():
    params, tokens = make_params(TINY), random.randint(random.key(3), (2, 6), 0, TINY.vocab)
    full = llama3.forward(params, tokens, TINY)
    logits, cache = llama3.prefill(params, tokens[:, :4], TINY, slots=9)
    torch.testing.assert_close(logits, full[:, 3], rtol=1e-4, atol=1e-4)
    before = [t.clone() for t in tree.leaves(cache)]
    for i in (4, 5):
        logits, new = llama3.decode(params, tokens[:, i], cache, TINY)
        torch.testing.assert_close(logits, full[:, i], rtol=1e-4, atol=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(cache), strict=True))
        cache, before = new, [t.clone() for t in tree.leaves(new)]


def test_temperature_needs_a_key_and_respects_valid_ids():
    params, prompt = make_params(TINY), torch.zeros((3, 1), dtype=torch.int64)
    sample = lambda seed: llama3.generate(  # noqa: E731
        params, prompt, TINY, max_new_tokens=20, temperature=2.0, key=random.key(seed), valid_ids=7
    )
    assert torch.equal(sample(0), sample(0)) and not torch.equal(sample(0), sample(1))
    assert sample(0).max() < 7
    with pytest.raises(ConfigError, match=r"key=ft\.random\.key"):
        llama3.generate(params, prompt, TINY, max_new_tokens=1, temperature=1.0)
    with pytest.raises(ConfigError, match="length >= 1"):
        llama3.generate(params, prompt[:, :0], TINY, max_new_tokens=1)


def test_documents_do_not_see_each_other():
    params, tokens = make_params(TINY), random.randint(random.key(4), (1, 9), 0, TINY.vocab)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    packed = llama3.forward(params, tokens, TINY, segment_ids_BS=segments)
    alone = llama3.forward(params, tokens[:, 4:], TINY)
    torch.testing.assert_close(packed[:, 4:], alone, rtol=1e-4, atol=1e-4)


def test_loss_does_not_depend_on_who_holds_which_sample():
    """Report B01: the loss is the global sum by the global count."""
    params, tokens = make_params(TINY), random.randint(random.key(5), (2, 9), 0, TINY.vocab)
    labels = tokens.roll(-1, 1)
    labels[0, 1:], labels[1, 8:] = -100, -100
    total, count = llama3.loss(params, {"tokens": tokens, "labels": labels}, TINY)
    rows = [llama3.loss(params, {"tokens": tokens[i : i + 1], "labels": labels[i : i + 1]}, TINY) for i in (0, 1)]
    assert int(count) == 9
    torch.testing.assert_close(total, rows[0][0] + rows[1][0])


def test_bfloat16_compute_keeps_float32_parameters_gradients_and_loss():
    config = dataclasses.replace(TINY, compute_dtype=torch.bfloat16)
    params, tokens = make_params(TINY), random.randint(random.key(6), (2, 9), 0, TINY.vocab)
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}

    def mean(config):
        return value_and_grad(lambda p: torch.div(*llama3.loss(p, batch, config)))(params)

    assert llama3.forward(params, tokens, config).dtype == torch.bfloat16
    (low, low_grads), (full, _) = mean(config), mean(TINY)
    assert low.dtype == torch.float32 and all(g.dtype == torch.float32 for g in tree.leaves(low_grads))
    torch.testing.assert_close(low, full, rtol=0.02, atol=0)


def test_config_errors_come_together():
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*dim=10(.|\n)*heads=4"):
        Llama3Config(dim=10, layers=1, heads=4, kv_heads=3, mlp_dim=4, vocab=4)
    with pytest.raises(ConfigError, match='Did you mean "70B"'):
        llama3.flavor("70b")
