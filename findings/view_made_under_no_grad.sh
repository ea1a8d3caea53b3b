#!/usr/bin/env bash
# torch 2.13, CPU: a view of a parameter that is made under no_grad says that it requires a gradient, and a loss of it can be
# differentiated without an error. No tensor gets a gradient.
#
# Expected: as documented, all results under no_grad have requires_grad=False. A loss of such results alone has no grad_fn, and
# its backward raises "element 0 of tensors does not require grad".
# Observed: `weight.t()`, `weight[0]` and `weight.unsqueeze(0)` have requires_grad=True, grad_fn=None and is_leaf=True, while
# `weight * 1` and `weight.detach()` have requires_grad=False. A loss of the view has a grad_fn, its backward ends without an error,
# and neither the view nor the parameter has a gradient. So a model whose only trained tensor is viewed by mistake under no_grad
# trains nothing, and no message says so; code that asks `requires_grad` to find what trains is misled.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.2.6"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch

print("torch", torch.__version__)
VIEWS = {"t()": lambda w: w.t(), "[0]": lambda w: w[0], "unsqueeze(0)": lambda w: w.unsqueeze(0)}
OTHERS = {"* 1": lambda w: w * 1, "detach()": lambda w: w.detach()}
for name, make in {**VIEWS, **OTHERS}.items():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        made = make(weight)
    loss = (made * 2).sum()
    try:
        loss.backward()
        outcome = f"gradients {made.grad} and {weight.grad}"
    except RuntimeError as error:
        outcome = str(error).partition(" and does not")[0]
    print(f"{name:<13} requires_grad={made.requires_grad}, grad_fn={made.grad_fn}, is_leaf={made.is_leaf}; backward: {outcome}")
    assert made.requires_grad == (name in VIEWS)
    assert made.grad_fn is None
    assert made.is_leaf
    assert outcome == ("gradients None and None" if name in VIEWS else "element 0 of tensors does not require grad")
PROGRAM
