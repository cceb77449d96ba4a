"""One call per op for the rule tests: (family, name) -> function and global inputs, all small, floats in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import functitan as ft
from functitan.ops.attention import attention
from functitan.ops.embedding import embedding
from functitan.ops.grouped_mm import grouped_mm
from functitan.optim.newton_schulz import newton_schulz

_generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def truth(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) > 0.5


@dataclass(frozen=True)
class Case:
    """An op call: a function of tensors, and inputs. Integer and bool inputs get no gradient, nor constant ones."""

    family: str
    name: str
    f: Callable[..., object]
    inputs: tuple[torch.Tensor, ...]
    constant: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


CASES: list[Case] = []


def case(
    family: str, name: str, f: Callable[..., object], *inputs: torch.Tensor, constant: tuple[int, ...] = ()
) -> None:
    CASES.append(Case(family, name, f, inputs, constant))


# --- pointwise -------------------------------------------------------------------------------------------------

UNARY = [
    "abs",
    "acos",
    "angle",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "frac",
    "isfinite",
    "isinf",
    "isnan",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "logit",
    "nan_to_num",
    "neg",
    "positive",
    "rad2deg",
    "reciprocal",
    "round",
    "rsqrt",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "i0",
]
for start in range(0, len(UNARY), 8):  # several in one call: what takes time is the number of traces
    group = [getattr(torch, name) for name in UNARY[start : start + 8]]
    case("pointwise", "_".join(UNARY[start : start + 8]), lambda x, group=group: [f(x) for f in group], positive(4, 6))
case("pointwise", "acosh", torch.acosh, positive(4, 6) + 1)

ACTIVATIONS = [
    "relu",
    "relu6",
    "silu",
    "gelu",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "softplus",
    "softsign",
    "tanhshrink",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "mish",
    "logsigmoid",
    "hardshrink",
    "softshrink",
    "threshold",
    "glu",
]
ARGUMENTS = {"threshold": (0.1, 20.0)}
for start in range(0, len(ACTIVATIONS), 5):
    names = ACTIVATIONS[start : start + 5]
    case("pointwise", "_".join(names), lambda x, names=names: [getattr(F, n)(x, *ARGUMENTS.get(n, ())) for n in names],
         normal(4, 8))  # fmt: skip
case("pointwise", "gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), normal(4, 8))
case("pointwise", "prelu", lambda x, w: F.prelu(x, w), normal(4, 8, 2), positive(8))

BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "pow",
    "hypot",
    "copysign",
    "logaddexp",
    "logaddexp2",
    "xlogy",
    "fmod",
    "remainder",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "nextafter",
    "rsub",
]
for start in range(0, len(BINARY), 6):
    group = [getattr(torch, name) for name in BINARY[start : start + 6]]
    case("pointwise", "_".join(BINARY[start : start + 6]), lambda x, y, group=group: [f(x, y) for f in group],
         positive(4, 6) + 0.05, positive(4, 6))  # fmt: skip
case("pointwise", "add_broadcast", lambda x, y: x + y, normal(4, 1, 6), normal(8, 6))
case("pointwise", "mul_broadcast", lambda x, y: x * y, normal(4, 1, 6), normal(8, 1))
case("pointwise", "add_alpha", lambda x, y: torch.add(x, y, alpha=0.3), normal(4, 6), normal(4, 6))
case("pointwise", "add_number", lambda x: x + 2, normal(4, 6))
case("pointwise", "rsub_number", lambda x: 2 - x, normal(4, 6))
case("pointwise", "mul_number", lambda x: x * 2, normal(4, 6))
case("pointwise", "rdiv_number", lambda x: 2 / x, positive(4, 6))
case("pointwise", "pow_number", lambda x: x**3, normal(4, 6))
case("pointwise", "rpow_number", lambda x: 2**x, normal(4, 6))
case("pointwise", "zero_dim", lambda x, s: x * s + s, normal(4, 6), normal())
case("pointwise", "int_div", lambda x, y: x // (y + 1), whole(9, 4, 6), whole(5, 4, 6))
case("pointwise", "true_div_ints", lambda x, y: x / (y + 1), whole(9, 4, 6), whole(5, 4, 6))
for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "gcd", "lcm"):
    case("pointwise", name, getattr(torch, name), whole(9, 4, 6), whole(5, 4, 6))
for name in ("logical_and", "logical_or", "logical_xor"):
    case("pointwise", name, getattr(torch, name), truth(4, 6), truth(4, 6))
case("pointwise", "bitwise_not", torch.bitwise_not, whole(9, 4, 6))
case("pointwise", "lerp", torch.lerp, normal(4, 6), normal(4, 6), normal(4, 6))
case("pointwise", "lerp_number", lambda x, y: torch.lerp(x, y, 0.3), normal(4, 6), normal(4, 6))
case(
    "pointwise", "addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), normal(4, 6), normal(4, 6), normal(4, 6)
)
case(
    "pointwise",
    "addcdiv",
    lambda x, y, z: torch.addcdiv(x, y, z, value=0.5),
    normal(4, 6),
    normal(4, 6),
    positive(4, 6),
)
case("pointwise", "clamp", lambda x: x.clamp(-0.5, 0.7), normal(4, 6))
case("pointwise", "clamp_min", lambda x: x.clamp_min(0.1), normal(4, 6))
case("pointwise", "clamp_max", lambda x: x.clamp_max(0.1), normal(4, 6))
case("pointwise", "clamp_tensor", lambda x, y: x.clamp(min=y), normal(4, 6), normal(6))
case("pointwise", "where", lambda c, x, y: torch.where(c, x, y), truth(4, 6), normal(4, 6), normal(4, 6))
case("pointwise", "where_number", lambda c, x: torch.where(c, x, 0.0), truth(4, 6), normal(4, 6))
case("pointwise", "masked_fill", lambda x, c: x.masked_fill(c, 2.0), normal(4, 6), truth(4, 6))
case("pointwise", "masked_fill_zero", lambda x, c: x.masked_fill(c, 0.0), normal(4, 6), truth(6))
case("pointwise", "masked_fill_tensor", lambda x, c, v: x.masked_fill(c, v), normal(4, 6), truth(4, 6), normal())
case("pointwise", "floor_divide", torch.floor_divide, positive(4, 6), positive(4, 6))
case("pointwise", "heaviside", torch.heaviside, whole(3, 4, 6).double() - 1, normal(4, 6))
case("pointwise", "ldexp", torch.ldexp, normal(4, 6), whole(3, 4, 6))
case("pointwise", "complex", lambda x, y: torch.complex(x, y).abs(), normal(4, 6), normal(4, 6))
case("pointwise", "polar", lambda x, y: torch.view_as_real(torch.polar(x, y)), positive(4, 6), normal(4, 6))
case("pointwise", "cast", lambda x: x.float().double(), normal(4, 6))
case("pointwise", "to_int", lambda x: (x * 10).to(torch.int64), normal(4, 6))
case("pointwise", "isin_range", lambda x: (x > 0.2) & (x < 0.7), positive(4, 6))
case("pointwise", "clone", lambda x: x.clone(), normal(4, 6))

# --- reductions ------------------------------------------------------------------------------------------------

for dim in (0, -1, (0, 2), None):
    for name in ("sum", "mean", "amax", "amin", "var", "std"):
        kwargs = {} if dim is None else {"dim": dim}
        case("reduction", f"{name}_{dim}", lambda x, n=name, k=kwargs: getattr(torch, n)(x, **k), normal(4, 6, 2))
for keep in (False, True):
    for name in (
        "sum",
        "prod",
        "max",
        "min",
        "cummax",
        "argmax",
        "argmin",
        "median",
        "all",
        "any",
        "logsumexp",
        "nansum",
    ):
        if keep and name == "cummax":
            continue
        kwargs = {"keepdim": True} if keep else {}
        x = truth(4, 6) if name in ("all", "any") else normal(4, 6)
        case("reduction", f"{name}_dim_{keep}", lambda x, n=name, k=kwargs: getattr(torch, n)(x, 1, **k), x)
for name in ("max", "min", "prod", "argmax", "argmin", "all", "any", "count_nonzero", "std", "norm"):
    x = truth(4, 6) if name in ("all", "any") else normal(4, 6)
    case("reduction", f"{name}_all", getattr(torch, name), x)
case("reduction", "argmax_negative_dim", lambda x: x.argmax(-2), normal(4, 6))
case("reduction", "count_nonzero_dim", lambda x: torch.count_nonzero(x, 1), whole(2, 4, 6))
case("reduction", "sum_ints", lambda x: x.sum(1), whole(9, 4, 6))
case("reduction", "sum_bool", lambda x: x.sum(), truth(4, 6))
case("reduction", "sum_dtype", lambda x: x.float().sum(0, dtype=torch.float64), normal(4, 6))
case("reduction", "mean_keep", lambda x: x - x.mean(-1, keepdim=True), normal(4, 6))
case("reduction", "var_biased", lambda x: x.var(-1, unbiased=False), normal(4, 6))
case("reduction", "var_mean", lambda x: torch.var_mean(x, 0), normal(4, 6))
case("reduction", "std_mean", lambda x: torch.std_mean(x, 0), normal(4, 6))
case("reduction", "aminmax", lambda x: torch.aminmax(x, dim=1), normal(4, 6))
for p in (1, 2, 3, float("inf")):
    case("reduction", f"vector_norm_{p}", lambda x, p=p: torch.linalg.vector_norm(x, p, dim=-1), normal(4, 6))
    case("reduction", f"vector_norm_all_{p}", lambda x, p=p: torch.linalg.vector_norm(x, p), normal(4, 6))
case("reduction", "frobenius", lambda x: torch.linalg.matrix_norm(x), normal(4, 6))
case("reduction", "normalize", lambda x: F.normalize(x, dim=-1), normal(4, 6))
case("reduction", "cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), normal(4, 6), normal(4, 6))
for name in ("cumsum", "cumprod", "logcumsumexp"):
    for dim in (0, -1):
        case("reduction", f"{name}_{dim}", lambda x, n=name, d=dim: getattr(torch, n)(x, d), normal(4, 6))
case("reduction", "cumsum_ints", lambda x: x.cumsum(-1), whole(9, 4, 6))
case("reduction", "trace", torch.trace, normal(4, 4))
case("reduction", "diff", lambda x: torch.diff(x, dim=1), normal(4, 6))

# --- softmax, losses, norms ------------------------------------------------------------------------------------

for dim in (0, -1):
    case("softmax", f"softmax_{dim}", lambda x, d=dim: x.softmax(d), normal(4, 8))
    case("softmax", f"log_softmax_{dim}", lambda x, d=dim: x.log_softmax(d), normal(4, 8))
case("softmax", "softmax_dtype", lambda x: x.float().softmax(-1, dtype=torch.float64), normal(4, 8))
case("softmax", "softmin", lambda x: F.softmin(x, dim=-1), normal(4, 8))
for reduction in ("mean", "sum", "none"):
    r = {"reduction": reduction}
    case("loss", f"cross_entropy_{reduction}", lambda x, t, r=r: F.cross_entropy(x, t, **r), normal(4, 8), whole(8, 4))
    case(
        "loss",
        f"cross_entropy_2d_{reduction}",
        lambda x, t, r=r: F.cross_entropy(x, t, **r),
        normal(2, 8, 4),
        whole(8, 2, 4),
    )
    case("loss", f"cross_entropy_weight_{reduction}", lambda x, t, w, r=r: F.cross_entropy(x, t, weight=w, ignore_index=3, **r),
         normal(4, 8), torch.tensor([0, 3, 5, 3]), positive(8), constant=(2,))  # fmt: skip
    case("loss", f"mse_{reduction}", lambda x, t, r=r: F.mse_loss(x, t, **r), normal(4, 8), normal(4, 8))
    case("loss", f"l1_{reduction}", lambda x, t, r=r: F.l1_loss(x, t, **r), normal(4, 8), normal(4, 8))
    case("loss", f"huber_{reduction}", lambda x, t, r=r: F.huber_loss(x, t, **r), normal(4, 8), normal(4, 8))
    case("loss", f"smooth_l1_{reduction}", lambda x, t, r=r: F.smooth_l1_loss(x, t, **r), normal(4, 8), normal(4, 8))
    case(
        "loss", f"bce_{reduction}", lambda x, t, r=r: F.binary_cross_entropy(x, t, **r), positive(4, 8), positive(4, 8)
    )
    case("loss", f"bce_logits_{reduction}", lambda x, t, w, r=r: F.binary_cross_entropy_with_logits(x, t, pos_weight=w, **r),
         normal(4, 8), positive(4, 8), positive(8), constant=(2,))  # fmt: skip
    case(
        "loss",
        f"kl_div_{reduction}",
        lambda x, t, r=r: F.kl_div(x.log_softmax(-1), t, **r),
        normal(4, 8),
        positive(4, 8),
    )
    case(
        "loss",
        f"soft_margin_{reduction}",
        lambda x, t, r=r: F.soft_margin_loss(x, t, **r),
        normal(4, 8),
        normal(4, 8),
        constant=(1,),
    )
    case("loss", f"nll_{reduction}", lambda x, t, r=r: F.nll_loss(x, t, **r), normal(4, 8), whole(8, 4))
case("loss", "cross_entropy_smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), normal(4, 8), whole(8, 4))
case("loss", "cross_entropy_probs", lambda x, t: F.cross_entropy(x, t), normal(4, 8), positive(4, 8))
case("norm", "layer_norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), normal(4, 2, 8), normal(8), normal(8))
case("norm", "layer_norm_two_dims", lambda x: F.layer_norm(x, (2, 8)), normal(4, 2, 8))
case("norm", "rms_norm", lambda x, w: F.rms_norm(x, (8,), w, 1e-5), normal(4, 2, 8), normal(8))
case("norm", "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), normal(4, 4, 6), normal(4), normal(4))
case("norm", "instance_norm", lambda x: F.instance_norm(x), normal(4, 4, 6))

# --- views and shapes ------------------------------------------------------------------------------------------

case("view", "reshape_join", lambda x: x.reshape(24, 2), normal(4, 6, 2))
case("view", "reshape_split", lambda x: x.reshape(2, 4, 3), normal(8, 3))
case("view", "flatten", lambda x: x.flatten(), normal(4, 6, 2))
case("view", "unflatten", lambda x: x.unflatten(-1, (4, -1)), normal(4, 8))
case("view", "transpose", lambda x: x.transpose(0, -1), normal(4, 6, 2))
case("view", "permute", lambda x: x.permute(2, 0, 1), normal(4, 6, 2))
case("view", "mT", lambda x: x.mT, normal(4, 6, 2))
case("view", "movedim", lambda x: x.movedim(0, -1), normal(4, 6, 2))
case("view", "squeeze", lambda x: x.squeeze(1), normal(4, 1, 2))
case("view", "unsqueeze", lambda x: x.unsqueeze(1), normal(4, 2))
case("view", "expand", lambda x: x.expand(3, 4, 6), normal(4, 1))
case("view", "expand_as", lambda x, y: x.expand_as(y) * y, normal(4, 1), normal(4, 6))
case("view", "view_as_complex", lambda x: torch.view_as_complex(x).abs(), normal(4, 6, 2))
case(
    "view",
    "rope",
    lambda x, f: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones_like(f), f)),
    normal(4, 6, 2),
    normal(6),
)
case(
    "view", "real_imag", lambda x: torch.view_as_complex(x).real * torch.view_as_complex(x).conj().imag, normal(4, 6, 2)
)
case("view", "diagonal", lambda x: x.diagonal(0, 0, 1), normal(4, 4, 2))
case("view", "unfold", lambda x: x.unfold(1, 3, 1), normal(4, 6))
case("view", "numpy_T", lambda x: x.T, normal(4, 6))
case("view", "atleast", lambda x: torch.atleast_2d(x), normal(4))
case("view", "meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij")[0] * y, normal(4), normal(6))

for name, f in {
    "cat": lambda x, y: torch.cat([x, y], -1),
    "cat_other": lambda x, y: torch.cat([x, y, x], 0),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "hstack": lambda x, y: torch.hstack([x, y]),
    "vstack": lambda x, y: torch.vstack([x, y]),
}.items():
    case("shape", name, f, normal(4, 6), normal(4, 6))
for name, f in {
    "split": lambda x: x.split(2, 0)[1] * 2,
    "split_sizes": lambda x: x.split([2, 4], 1),
    "chunk": lambda x: x.chunk(2, -1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, 1),
    "unbind": lambda x: x.unbind(0),
    "unbind_last": lambda x: x.unbind(-1)[2],
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_value": lambda x: F.pad(x, (0, 0, 1, 2), value=3.0),
    "pad_negative": lambda x: F.pad(x, (-1, 0)),
    "roll": lambda x: x.roll(2, 1),
    "roll_flat": lambda x: x.roll(2),
    "flip": lambda x: x.flip(0),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_new_dim": lambda x: x.repeat(3, 1, 2),
    "tile": lambda x: torch.tile(x, (2,)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "repeat_interleave_flat": lambda x: x.repeat_interleave(2),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "rot90": lambda x: torch.rot90(x),
    "diag_embed": lambda x: torch.diag_embed(x),
    "slice": lambda x: x[1:3],
    "slice_step": lambda x: x[:, ::2],
    "slice_all": lambda x: x[:, :],
    "select": lambda x: x[1],
    "select_last": lambda x: x[..., -1],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "ellipsis": lambda x: x[..., None, 1:],
    "reflect": lambda x: F.pad(x, (2, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1), mode="circular"),
}.items():
    case("shape", name, f, normal(4, 6))
case("shape", "diag_matrix", lambda x: torch.diag(x), normal(4, 4))
case("shape", "diag_vector", lambda x: torch.diag(x), normal(4))
case("shape", "one_hot", lambda i: F.one_hot(i, 8), whole(8, 4, 6))
for name, f in {
    "arange": lambda x: x + torch.arange(6),
    "arange_step": lambda x: x * torch.arange(1.0, 13, 2, dtype=torch.float64),
    "linspace": lambda x: x * torch.linspace(0.5, 2, 6, dtype=torch.float64),
    "eye": lambda x: x @ torch.eye(6, dtype=torch.float64) * torch.eye(4, 6, dtype=torch.float64),
    "full": lambda x: x + torch.full((4, 1), 2.0, dtype=torch.float64),
    "full_like": lambda x: x + torch.full_like(x, 2.0),
    "zeros_ones": lambda x: x * torch.ones(6, dtype=torch.float64) + torch.zeros_like(x) + x.new_zeros(4, 6),
    "tril_mask": lambda x: x.masked_fill(~torch.ones(4, 6, dtype=torch.bool).tril(), 0.0),
    "constant": lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64),
}.items():
    case("factory", name, f, normal(4, 6))

# --- indexing --------------------------------------------------------------------------------------------------

case("index", "index_select", lambda x, i: x.index_select(0, i), normal(8, 6), whole(8, 4))
case("index", "index_select_last", lambda x, i: x.index_select(-1, i), normal(4, 8), whole(8, 4))
case("index", "rows", lambda x, i: x[i], normal(8, 6), whole(8, 4))
case("index", "rows_2d", lambda x, i: x[i], normal(8, 6), whole(8, 4, 2))
case("index", "columns", lambda x, i: x[:, i], normal(4, 8, 2), whole(8, 6))
case("index", "pairs", lambda x, i, j: x[i, j], normal(8, 6, 2), whole(8, 4), whole(6, 4))
case("index", "apart", lambda x, i, j: x[i, :, j], normal(8, 4, 6), whole(8, 4), whole(6, 4))
case("index", "broadcast", lambda x, i, j: x[i[:, None], j], normal(8, 6), whole(8, 4), whole(6, 2))
case("index", "negative", lambda x, i: x[i - 8], normal(8, 6), whole(8, 4))
case("index", "gather", lambda x, i: x.gather(1, i), normal(4, 8), whole(8, 4, 2))
case("index", "gather_short", lambda x, i: x.gather(1, i), normal(4, 8), whole(8, 2, 2))
case("index", "gather_dim0", lambda x, i: x.gather(0, i), normal(8, 4), whole(8, 2, 4))
case("index", "take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), normal(4, 8), whole(8, 4, 2))
case("index", "scatter", lambda x, i, v: x.scatter(1, i, v), normal(4, 8), torch.tensor([[0, 3]] * 4), normal(4, 2))
case("index", "scatter_value", lambda x, i: x.scatter(1, i, 2.0), normal(4, 8), whole(8, 4, 2))
case("index", "scatter_add", lambda x, i, v: x.scatter_add(1, i, v), normal(4, 8), whole(8, 4, 2), normal(4, 2))
case(
    "index",
    "scatter_add_zeros",
    lambda i, v: torch.zeros(4, 8, dtype=torch.float64).scatter_add(1, i, v),
    whole(8, 4, 2),
    normal(4, 2),
)
case(
    "index",
    "scatter_reduce",
    lambda x, i, v: x.scatter_reduce(1, i, v, "amax"),
    normal(4, 8),
    whole(8, 4, 2),
    normal(4, 2),
)
case(
    "index",
    "scatter_reduce_sum",
    lambda x, i, v: x.scatter_reduce(1, i, v, "sum"),
    normal(4, 8),
    whole(8, 4, 2),
    normal(4, 2),
)
case("index", "index_add", lambda x, i, v: x.index_add(0, i, v), normal(8, 6), whole(8, 4), normal(4, 6))
case(
    "index", "index_copy", lambda x, i, v: x.index_copy(0, i, v), normal(8, 6), torch.tensor([0, 5, 2, 3]), normal(4, 6)
)
case("index", "index_fill", lambda x, i: x.index_fill(0, i, 2.0), normal(8, 6), whole(8, 4))
case("index", "index_put", lambda x, i, v: x.index_put((i,), v), normal(8, 6), torch.tensor([0, 5, 2, 3]), normal(4, 6))
case(
    "index",
    "index_put_add",
    lambda x, i, v: x.index_put((i,), v, accumulate=True),
    normal(8, 6),
    whole(8, 4),
    normal(4, 6),
)
case(
    "index",
    "index_put_zeros",
    lambda i, v: torch.zeros(8, 6, dtype=torch.float64).index_put((i,), v, accumulate=True),
    whole(8, 4),
    normal(4, 6),
)
case(
    "index",
    "index_put_column",
    lambda x, i, v: x.index_put((torch.arange(4), i), v),
    normal(4, 8),
    whole(8, 4),
    normal(4),
)
case("index", "embedding", lambda w, i: F.embedding(i, w), normal(8, 6), whole(8, 4, 2))
case("index", "embedding_padding", lambda w, i: F.embedding(i, w, padding_idx=2), normal(8, 6), whole(8, 4, 2))
case("index", "take", lambda x, i: torch.take(x, i), normal(4, 8), whole(32, 4))

for name, f in {
    "sort": lambda x: x.sort(-1),
    "sort_descending": lambda x: x.sort(0, descending=True)[0],
    "sort_stable": lambda x: x.sort(dim=-1, stable=True)[0],
    "argsort": lambda x: x.argsort(-1),
    "msort": lambda x: torch.msort(x),
    "topk": lambda x: x.topk(2, -1),
    "kthvalue": lambda x: x.kthvalue(2, -1)[0],
    "median": lambda x: x.median(-1)[0],
    "mode": lambda x: x.mode(-1)[0],
    "quantile": lambda x: x.quantile(0.3, dim=-1),
}.items():
    case("sort", name, f, normal(4, 6))
case("sort", "searchsorted", lambda s, x: torch.searchsorted(s.sort()[0], x), normal(8), normal(4, 6))
case("sort", "searchsorted_rows", lambda s, x: torch.searchsorted(s.sort(-1)[0], x), normal(4, 8), normal(4, 6))
case("sort", "bucketize", lambda x, s: torch.bucketize(x, s.sort()[0]), normal(4, 6), normal(8))

# --- matrix products -------------------------------------------------------------------------------------------

case("matmul", "mm", torch.mm, normal(4, 6), normal(6, 8))
case("matmul", "bmm", torch.bmm, normal(2, 4, 6), normal(2, 6, 8))
case("matmul", "mv", torch.mv, normal(4, 6), normal(6))
case("matmul", "dot", torch.dot, normal(6), normal(6))
case("matmul", "outer", torch.outer, normal(4), normal(6))
case("matmul", "matmul_3_2", torch.matmul, normal(2, 4, 6), normal(6, 8))
case("matmul", "matmul_2_3", torch.matmul, normal(4, 6), normal(2, 6, 8))
case("matmul", "matmul_4_4", torch.matmul, normal(2, 2, 4, 6), normal(2, 2, 6, 8))
case("matmul", "matmul_4_3", torch.matmul, normal(2, 2, 4, 6), normal(2, 6, 8))
case("matmul", "matmul_1_2", torch.matmul, normal(6), normal(6, 8))
case("matmul", "matmul_3_1", torch.matmul, normal(2, 4, 6), normal(6))
case("matmul", "linear", F.linear, normal(2, 4, 6), normal(8, 6), normal(8))
case("matmul", "bilinear", F.bilinear, normal(4, 6), normal(4, 2), normal(8, 6, 2))
case(
    "matmul", "addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), normal(4, 8), normal(4, 6), normal(6, 8)
)
case("matmul", "baddbmm", torch.baddbmm, normal(2, 4, 8), normal(2, 4, 6), normal(2, 6, 8))
case("matmul", "addmv", torch.addmv, normal(4), normal(4, 6), normal(6))
case("matmul", "addbmm", torch.addbmm, normal(4, 8), normal(2, 4, 6), normal(2, 6, 8))
for text, shapes in {
    "bij,bjk->bik": ((2, 4, 6), (2, 6, 8)),
    "bshd,hde->bse": ((2, 4, 2, 6), (2, 6, 8)),
    "ij,kj->ik": ((4, 6), (8, 6)),
    "ij->ji": ((4, 6),),
    "ii->i": ((4, 4),),
    "ij,ij->": ((4, 6), (4, 6)),
    "i,j->ij": ((4,), (6,)),
    "abc,cd,de->abe": ((2, 4, 6), (6, 2), (2, 8)),
}.items():
    case("matmul", f"einsum_{text}", lambda *xs, text=text: torch.einsum(text, *xs), *(normal(*s) for s in shapes))
case("matmul", "tensordot", lambda x, y: torch.tensordot(x, y, dims=2), normal(2, 4, 6), normal(4, 6, 2))
case("matmul", "kron", torch.kron, normal(2, 4), normal(2, 2))
case("matmul", "cdist_like", lambda x, y: (x[:, None] - y[None]).square().sum(-1), normal(4, 6), normal(2, 6))
case("conv", "conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), normal(2, 4, 6), normal(8, 4, 3), normal(8))
case("conv", "conv1d_stride", lambda x, w: F.conv1d(x, w, stride=2, dilation=2), normal(2, 4, 8), normal(8, 4, 3))
case("conv", "conv1d_groups", lambda x, w, b: F.conv1d(x, w, b, groups=2), normal(2, 4, 6), normal(8, 2, 3), normal(8))
case(
    "conv",
    "conv1d_depthwise",
    lambda x, w, b: F.conv1d(x, w, b, groups=4, padding=2),
    normal(2, 4, 6),
    normal(4, 1, 3),
    normal(4),
)
case("conv", "conv2d", lambda x, w, b: F.conv2d(x, w, b), normal(2, 4, 6, 4), normal(8, 4, 3, 2), normal(8))
case(
    "conv", "conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b), normal(2, 4, 6), normal(4, 8, 3), normal(8)
)
for name, f in {
    "avg_pool1d": lambda x: F.avg_pool1d(x.flatten(2), 3, padding=1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, stride=1),
    "avg_pool2d_unbatched": lambda x: F.avg_pool2d(x[0], 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x[..., None], (2, 2, 1)),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x[..., None], (3, 2, 1)),
    "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 2),
    "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 3),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, stride=1, padding=1),
    "max_pool2d_indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "max_pool3d": lambda x: F.max_pool3d(x[..., None], (2, 2, 1)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x[..., None], (3, 2, 1)),
    "upsample_linear": lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
    "upsample_bilinear": lambda x: F.interpolate(x, size=(8, 5), mode="bilinear", align_corners=True),
    "upsample_bilinear_antialias": lambda x: F.interpolate(x, size=(2, 3), mode="bilinear", antialias=True),
    "upsample_bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "upsample_nearest": lambda x: F.interpolate(x, scale_factor=2),
    "upsample_nearest_exact": lambda x: F.interpolate(x, size=(7, 5), mode="nearest-exact"),
    "upsample_nearest3d": lambda x: F.interpolate(x[..., None], scale_factor=2),
    "upsample_trilinear": lambda x: F.interpolate(x[..., None], scale_factor=2, mode="trilinear"),
    "unfold2d": lambda x: F.unfold(x, 2, padding=1),
    "fold2d": lambda x: F.fold(x.flatten(2), (5, 5), (2, 2)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
}.items():
    case("image", name, f, normal(4, 8, 4, 4) if name != "fold2d" else normal(4, 8, 16, 1))
case("image", "channel_shuffle", lambda x: F.channel_shuffle(x, 2), normal(2, 4, 2, 2), constant=(0,))
case(
    "image",
    "grid_sample",
    lambda x, grid: F.grid_sample(x, grid * 2 - 1, align_corners=False),
    normal(2, 4, 6, 6),
    positive(2, 4, 2, 2),
)
case(
    "image",
    "grid_sample3d",
    lambda x, grid: F.grid_sample(x, grid * 2 - 1, align_corners=True),
    normal(2, 2, 3, 3, 3),
    positive(2, 2, 2, 2, 3),
)
case("image", "affine_grid", lambda t: F.affine_grid(t, [2, 3, 4, 4], align_corners=False), normal(2, 2, 3))
case("transform", "fft", lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)), normal(4, 6, 2))
case("transform", "rfft2", lambda x: torch.view_as_real(torch.fft.rfft2(x)), normal(4, 4, 6))
case("transform", "irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x), n=6), normal(4, 2, 6))
case("transform", "fftshift", lambda x: torch.view_as_real(torch.fft.fftshift(torch.fft.ifft(x))), normal(4, 6))
case("transform", "cdist1", lambda x, y: torch.cdist(x, y, p=1), normal(2, 4, 3), normal(2, 2, 3))
case("transform", "cdist2", lambda x, y: torch.cdist(x, y), normal(4, 3), normal(2, 3))
case("transform", "cdist3", lambda x, y: torch.cdist(x, y, p=3), normal(1, 4, 3), normal(2, 2, 3))
case("transform", "pdist", F.pdist, normal(4, 3))
case("matmul", "block_diag", torch.block_diag, normal(2, 2), normal(4, 2))
case("reduction", "renorm", lambda x: torch.renorm(x, 2, 0, 1.0), normal(4, 6))
case("reduction", "norm_old", lambda x: torch.norm(x, 3, 1), normal(4, 6))
case("reduction", "triplet", F.triplet_margin_loss, normal(4, 6), normal(4, 6), normal(4, 6))
case("linalg", "matrix_exp", torch.linalg.matrix_exp, normal(4, 2, 2))
for name, f in {
    "inv": torch.linalg.inv,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 4 * torch.eye(4, dtype=x.dtype)),
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "qr": torch.linalg.qr,
    "eigh": lambda x: torch.linalg.eigh(x + x.mT)[0],
    "svdvals": torch.linalg.svdvals,
    "solve": lambda x: torch.linalg.solve(x, x.mT),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(
        x.tril() + 4 * torch.eye(4, dtype=x.dtype), x, upper=False
    ),
}.items():
    case("linalg", name, f, normal(2, 4, 4))
case("linalg", "cross", torch.linalg.cross, normal(4, 3), normal(4, 3))

# --- writes on intermediates -----------------------------------------------------------------------------------


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1).mul_(x)
    return y


def _set_row(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1] = x[0]
    y[:, 2:4] = 0.0
    return y


def _set_through_view(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    rows = y.view(-1)
    rows.copy_(x.reshape(-1))
    y[:, 0].mul_(3)
    return y + rows.view_as(x)


def _fill_masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[m] = 0.0
    return y.relu_()


def _scatter_in_place(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(8, 6, dtype=x.dtype)
    y.index_add_(0, i, x)
    y[i] += x
    return y


case("write", "in_place", _in_place, normal(4, 6))
case("write", "set_row", _set_row, normal(4, 6))
case("write", "set_through_view", _set_through_view, normal(4, 6))
case("write", "fill_masked", _fill_masked, normal(4, 6), truth(4, 6))
case("write", "scatter_in_place", _scatter_in_place, normal(4, 6), whole(8, 4))

# --- ops of our own --------------------------------------------------------------------------------------------

_SEGMENTS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
case("ours", "attention", lambda q, k, v: attention(q, k, v, causal=True, backend="math"),
     normal(2, 4, 4, 6), normal(2, 2, 4, 6), normal(2, 2, 4, 2))  # fmt: skip
case("ours", "attention_lse", lambda q, k, v: attention(q, k, v, return_lse=True, backend="math"),
     normal(2, 4, 4, 6), normal(2, 2, 4, 6), normal(2, 2, 4, 2))  # fmt: skip
case("ours", "attention_one_kv_head", lambda q, k, v, i: attention(q, k, v, segment_ids=i, backend="math"),
     normal(2, 4, 4, 6), normal(2, 1, 4, 6), normal(2, 1, 4, 2), _SEGMENTS)  # fmt: skip
case("ours", "attention_bias_sink", lambda q, k, v, b, s: attention(q, k, v, bias=b, sink=s, backend="math"),
     normal(2, 4, 4, 6), normal(2, 2, 4, 6), normal(2, 2, 4, 2), normal(4, 4, 4), normal(4), constant=(3,))  # fmt: skip
case("ours", "sdpa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
     normal(2, 4, 4, 6), normal(2, 4, 4, 6), normal(2, 4, 4, 6))  # fmt: skip
case("ours", "embedding", lambda w, i: embedding(i, w), normal(8, 6), whole(8, 4, 2))
case("ours", "grouped_mm", lambda x, w: grouped_mm(x, w, torch.tensor([2, 2, 5, 6])), normal(8, 4), normal(4, 4, 6))
case("ours", "newton_schulz", lambda x: newton_schulz(x.detach(), dtype=torch.float64), normal(4, 3, 6), constant=(0,))
case("ours", "bernoulli", lambda x: x * ft.random.bernoulli(ft.random.key(1), 0.5, x.shape), normal(4, 6))
