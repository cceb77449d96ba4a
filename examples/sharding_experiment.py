"""One sharding experiment: change one rule of a recipe, see what is sent and held change, and the numbers stay.

    python examples/sharding_experiment.py [--steps N] [--layers N]

The rule "seq" says how the residual stream of a Llama lies along its sequence. None keeps it whole on every rank of the
axis "tensor"; "tensor" splits it there (Megatron's sequence parallelism). The model is not touched.
"""

import argparse
from dataclasses import replace

from functitan.recipes import load_recipe
from functitan.train import build_steps
from functitan.train.abstract import lower_step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    debug = load_recipe("llama3-debug")
    debug = debug.replace(
        model=replace(debug.model, layers=args.layers),
        run=replace(debug.run, steps=args.steps),
        mesh={"fsdp": 2, "tensor": 2},
        simulate=True,
    )
    recipes = {f"seq={axis}": debug.replace(rules=debug.rules.replace(seq=axis)) for axis in (None, "tensor")}

    # What a step would send and hold, from its lowered program: nothing runs.
    for name, recipe in recipes.items():
        program = lower_step(recipe.textless_task())
        memory = program.memory()
        print(
            f"{name}: activations saved for backward {memory['saved activations'] / 2**20:.2f} MiB a rank, "
            f"peak {memory.peak / 2**20:.2f} MiB"
        )
        for (kind, axes), (count, nbytes) in sorted(program.collectives().totals().items()):
            if axes == ("tensor",):
                print(f"  {count:>3} {kind:<14} over tensor {nbytes / 2**10:>8.1f} KiB")

    # The same steps on one device, and by four simulated ranks under each rule.
    losses = {}
    for name, recipe in {"one device": debug.replace(mesh={}), **recipes}.items():
        task = recipe.task()
        steps = build_steps(task)
        state = steps.init()
        losses[name] = []
        for i in range(args.steps):
            state, metrics = steps.train(state, task.source.batch(i))
            losses[name].append(metrics["loss"].item())
    print(f"\nstep  {'  '.join(f'{name:>10}' for name in losses)}")
    for i, row in enumerate(zip(*losses.values(), strict=True), 1):
        print(f"{i:>4}  {'  '.join(f'{x:>10.6f}' for x in row)}")
    worst = max((max(row) - min(row)) / min(row) for row in zip(*losses.values(), strict=True))
    print(f"largest relative difference of a loss {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
