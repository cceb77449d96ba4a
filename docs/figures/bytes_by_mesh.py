"""Draws bytes_by_mesh.svg: what one rank sends in one train step of Llama 3.1 8B, by how 64 ranks are arranged.

    pip install '.[docs]'
    python docs/figures/bytes_by_mesh.py

Each bar is a sum over ``program.collectives()`` of the lowered train step; nothing runs and nothing is fitted.
"""

from dataclasses import replace
from pathlib import Path

from functitan.compiler.collectives import Collective
from functitan.recipes import Recipe, load_recipe, with_mesh
from functitan.train.abstract import lower_step

MESHES = (
    {"fsdp": 64},
    {"data": 8, "fsdp": 8},
    {"fsdp": 32, "tensor": 2},
    {"fsdp": 16, "tensor": 4},
    {"fsdp": 8, "tensor": 8},
)
# Light to dark: parameters, gradients, activations; readable without colours.
PARTS = {
    "parameters gathered, forward": "#9ecae1",
    "parameters gathered, backward": "#4292c6",
    "gradients reduced": "#08519c",
    "activations, forward": "#fdae6b",
    "activations, backward": "#d94801",
}


def part_of(c: Collective) -> str:
    """Which part of a bar a collective belongs to."""
    late = "backward" if c.backward else "forward"
    if not c.param:
        return f"activations, {late}"
    return f"parameters gathered, {late}" if c.kind == "all_gather" else "gradients reduced"


def sent(recipe: Recipe) -> dict[str, int]:
    """Bytes that one rank sends in one step of a recipe, by part."""
    found = dict.fromkeys(PARTS, 0)
    for c in lower_step(recipe.textless_task()).collectives():
        found[part_of(c)] += c.total
    return found


def draw(path: Path) -> None:
    """Lower the step for every mesh and draw the bars."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    # The same file each time, with text as text.
    plt.rcParams.update({"svg.hashsalt": "functitan", "svg.fonttype": "none", "font.size": 11})
    recipe = load_recipe("llama3-8b")
    recipe = recipe.replace(data=replace(recipe.data, batch=64))
    names = [",".join(f"{axis}={n}" for axis, n in mesh.items()) for mesh in MESHES]
    bars = [sent(with_mesh(recipe, mesh)) for mesh in MESHES]
    figure, axes = plt.subplots(figsize=(9, 3.6))
    left = [0.0] * len(bars)
    for part, colour in PARTS.items():
        widths = [bar[part] / 2**30 for bar in bars]
        axes.barh(names, widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for name, end in zip(names, left, strict=True):
        axes.text(end + 0.6, name, f"{end:.1f}", va="center")
        print(f"{name:<16} {end:8.3f} GiB")
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.07)
    axes.set_xlabel("GiB sent by one rank in one train step")
    axes.set_title(
        "Llama 3.1 8B on 64 ranks, 64 sequences of 8192 tokens, bfloat16, layers recomputed", fontsize=11, loc="left"
    )
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
