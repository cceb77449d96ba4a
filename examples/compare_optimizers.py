"""AdamW against Muon on the debug Llama: the same weights, batches, schedule and steps, each at the best of a few rates.

    pip install '.[docs]'
    python examples/compare_optimizers.py --out docs/figures/compare_optimizers.svg

The rate of each rule is chosen by the held-out loss at the end; all runs are drawn. Under Muon, the leaves that are no
matrices of layers (embedding, head, norms) are stepped by AdamW at the recipe's own rate. A run whose folder is there
is read, not repeated.
"""

import argparse
import json
from pathlib import Path

from functitan.recipes import load_recipe, override
from functitan.train import train

#: Recipe and the setting that is its rule's rate.
RULES = {"AdamW": ("llama3-debug", "optim.lr"), "Muon": ("llama3-debug-muon", "optim.muon_lr")}
#: Half the debug model's width and two thirds of its layers, so that six runs take minutes.
SMALL = ["model.dim=128", "model.mlp_dim=384", "model.layers=4", "model.heads=4", "model.kv_heads=2"]
COLOURS = {"AdamW": "#4292c6", "Muon": "#d94801"}


def run(recipe, settings, folder):
    """Training losses by step, and the held-out loss in nats per byte at the end."""
    if not (folder / "params.safetensors").exists():
        train(override(load_recipe(recipe), [*settings, f"run.dir={folder}", "run.sample_tokens=0"]).task())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row], rows[-1]["validation_loss"]


def smooth(losses, share=0.9):
    """A moving average that starts at the first loss, to draw."""
    out, kept = [], losses[0]
    for loss in losses:
        kept = share * kept + (1 - share) * loss
        out.append(kept)
    return out


def draw(found, best, path):
    """All runs, the chosen ones thick."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "functitan", "svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(9, 3.8))
    for (rule, rate), (losses, validation) in found.items():
        chosen = best[rule] == rate
        axes.plot(
            range(1, len(losses) + 1),
            smooth(losses),
            color=COLOURS[rule],
            linewidth=2.2 if chosen else 0.8,
            alpha=1.0 if chosen else 0.5,
            label=f"{rule}, rate {rate:g}: {validation:.3f} nats per byte held out" if chosen else None,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token (smoothed)")
    lowest = min(smooth(losses)[-1] for losses, _ in found.values())
    axes.set_ylim(0.95 * lowest, 2.2 * lowest)
    axes.set_title(
        "A Llama of width 128, 4 layers, one schedule; thin lines: rates that were not chosen", fontsize=11, loc="left"
    )
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2, 3e-2])
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="for all runs")
    parser.add_argument("--runs", type=Path, default=Path("out/compare_optimizers"), help="where the runs are kept")
    parser.add_argument("--out", type=Path, help="where to draw the curves; without it nothing is drawn")
    args = parser.parse_args()
    found, best = {}, {}
    for rule, (recipe, rate_field) in RULES.items():
        for rate in args.rates:
            settings = [*SMALL, f"run.steps={args.steps}", f"optim.warmup={args.steps // 10}", *args.set]
            found[rule, rate] = run(recipe, [*settings, f"{rate_field}={rate}"], args.runs / f"{rule}-{rate:g}")
        best[rule] = min(args.rates, key=lambda rate: found[rule, rate][1])
    print("\nrule   rate     first loss  last loss  held out")
    for (rule, rate), (losses, validation) in found.items():
        mark = "  chosen" if best[rule] == rate else ""
        print(f"{rule:<6} {rate:<8g} {losses[0]:>10.4f} {losses[-1]:>10.4f} {validation:>9.4f}{mark}")
    if args.out:
        draw(found, best, args.out)


if __name__ == "__main__":
    main()
